"""Activations on a real slab, under the SIMD step, with a plan's bytes confirmed. Fails if the disk changes a bit or a
planned byte is not written."""

import pytest

from tests.integration.zero_train.helpers import trained
from zero_train.errors import ConfigError
from zero_train.run import assemble, planning, run_folder, train
from zero_train.run.ranks import Ranks
from zero_train.settings import compose

ENOUGH = ("data.sequence_length=512", "run.steps=2")  # inputs of 128 KiB: large enough to be set aside


def written(run) -> int:
    """Bytes of all steps: a step's own line leaves out what its update still has to write, except the last one's."""
    return sum(step.nvme_write_bytes for step in run.steps)


def test_every_policy_of_a_run_gives_the_same_bits(tmp_path):
    kept = trained(tmp_path / "keep", *ENOUGH, "offload=nvme")
    for number, policy in enumerate(("recompute", "host", "nvme", "[keep,recompute,nvme,keep,keep]")):
        run = trained(tmp_path / str(number), *ENOUGH, "offload=nvme", f"offload.activations={policy}")
        assert run.losses == kept.losses, policy
        assert run.digest == kept.digest, policy
        layers = 2 if policy == "nvme" else 1 if "nvme" in policy else 0
        # steps x layers x rows x length x width x bf16
        assert written(run) - written(kept) == 2 * layers * 2 * 512 * 64 * 2, policy


@pytest.mark.promise("offload-rows-key")
@pytest.mark.parametrize("policy", ["recompute", "host", "nvme"])
def test_rows_at_a_time_train_as_whole_batches_do(tmp_path, policy):
    """Fails if a row is left out, or counted twice, or the parameters are read once for each part."""
    options = (*ENOUGH, "offload=nvme", "precision=fp32", "precision.states=fp32", f"offload.activations={policy}")
    options = (*options, "run.micro_batch=4", "run.evaluate_every=2", "offload.overlap=false")
    whole, cut = (trained(tmp_path / rows, *options, f"offload.rows={rows}") for rows in ("null", "1"))
    assert cut.losses == pytest.approx(whole.losses, rel=1e-6)
    assert dict(cut.validation) == pytest.approx(dict(whole.validation), rel=1e-6)
    for moved in ("nvme_read_bytes", "nvme_write_bytes"):
        assert getattr(cut.steps[-1], moved) == getattr(whole.steps[-1], moved)


def test_left_to_the_planner_memory_decides(tmp_path):
    sizes = ["model.hidden_size=256", "model.layers=8", "run.micro_batch=8", "data.sequence_length=1024"]
    options = ["recipe=tiny", "precision=bf16", "run.dir=unused", "offload=auto", "offload.nvme_paths=[/]", *sizes]

    def chosen(host_gib):
        composed = compose.compose([*options, "hardware.nvme_gib=100", f"hardware.host_gib={host_gib}"])
        draft = assemble.draft(composed)
        return set(planning.make(composed, draft.model, Ranks(), draft.step).activations)

    assert chosen(50) == {"keep"}
    assert chosen(1.6) == {"keep", "recompute"}
    assert "nvme" in chosen(0.8)


def test_a_list_of_another_length_a_name_of_nothing_and_a_store_that_is_missing_are_refused(tmp_path):
    parts = ("offload=host", "offload.activations=recompute", "run.micro_batch=2", "offload.rows=1", "offload.tokens=8")
    for overrides, words in (
        ((*parts, "offload.row_modules=[h.*]"), "row_modules= has 'h.*', and no module is called that"),
        ((*parts, "offload.token_modules=[ffn]"), "token_modules= has 'ffn', and no module is called that"),
        (("offload=host", "offload.activations=[keep,recompute]"), "2 activation policies for 5 units"),
        (("offload=none", "offload.activations=nvme"), "offload.activations=nvme needs nvme"),
        (("offload=host", "offload.activations=disk"), "offload.activations=disk"),
    ):
        with pytest.raises(ConfigError, match=words):
            train.run(compose.compose(["recipe=tiny", "data=synthetic", f"run.dir={tmp_path / 'run'}", *overrides]))
    assert not run_folder.results(tmp_path / "run")
