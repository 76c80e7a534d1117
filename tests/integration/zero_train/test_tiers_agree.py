"""Where states and activations live changes no bit: host and nvme exactly, a plain loop within rounding.

On a real slab, under the SIMD step, with a plan's bytes confirmed. Fails if the disk changes a bit or a planned byte is
not written.
"""

import re
import sys

import pytest
import torch
from torch.nn.functional import cross_entropy

import zero_core
from tests.integration.zero_train.helpers import COMMON, trained
from tests.reference import Reference
from zero_train.cli import app
from zero_train.data import text
from zero_train.errors import ConfigError
from zero_train.model import causal_lm
from zero_train.run import assemble, loop, planning
from zero_train.run.ranks import Ranks
from zero_train.settings import compose

pytestmark = pytest.mark.promise("train-tiers-agree")

STEPS = 50


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """The same run with its states in three places."""
    folder = tmp_path_factory.mktemp("one")
    return {
        place: trained(folder / place, f"offload={place}", f"run.steps={STEPS}") for place in ("none", "host", "nvme")
    }


def test_host_and_nvme_agree_to_the_last_bit_the_device_store_nearly_and_all_learn(one_rank):
    assert len(one_rank["host"].losses) == STEPS
    assert one_rank["host"].losses == one_rank["nvme"].losses
    assert one_rank["host"].digest == one_rank["nvme"].digest
    assert one_rank["nvme"].steps[-1].nvme_write_bytes > 0  # it did go through the disk
    assert one_rank["host"].steps[-1].nvme_write_bytes == 0
    losses = one_rank["nvme"].losses
    assert one_rank["none"].losses == pytest.approx(losses, abs=1e-3)
    assert losses[0] == pytest.approx(5.55, abs=0.15)  # ln 256
    assert sum(losses[-5:]) / 5 < losses[0] - 1


@pytest.mark.promise("train-muon")
def test_muon_has_two_rates_learns_and_has_the_same_bits_on_host_and_nvme(tmp_path):
    words = ("optim=muon", "optim.matrix_lr=0.01", "run.steps=30")
    host, nvme = (trained(tmp_path / place, f"offload={place}", *words) for place in ("host", "nvme"))
    assert host.losses == nvme.losses and host.digest == nvme.digest
    assert nvme.steps[-1].nvme_write_bytes > 0
    assert sum(host.losses[-5:]) / 5 < host.losses[0] - 1
    slower = trained(tmp_path / "slower", "offload=host", *words, "optim.matrix_lr=0.001")
    assert slower.losses[:1] == host.losses[:1] and slower.losses != host.losses
    exact = trained(tmp_path / "exact", "offload=nvme", *words, "optim.orthogonal=float32")
    assert exact.losses[:2] == pytest.approx(host.losses[:2], abs=1e-2) and exact.losses != host.losses
    assert sum(exact.losses[-5:]) / 5 == pytest.approx(sum(host.losses[-5:]) / 5, abs=0.1)


@pytest.mark.promise("same-bits")
def test_tiles_threads_backends_and_overlap_change_no_bit(tmp_path):
    """Units have 2.6 Mi elements. Forward and backward run on one thread, as their sums are torch's."""
    wide = ("model.hidden_size=512", "model.intermediate_size=1024", "run.steps=3", "run.accumulate=2")
    plain = trained(tmp_path / "plain", *wide, "offload=host", "offload.overlap=false", "optim.threads=1")
    halves = " ".join(f"offload.{kind}={{host:0.5,nvme:0.5}}" for kind in ("parameters", "gradients", "optimizer"))
    for number, (mi, words) in enumerate(
        (
            (1, "offload=nvme optim.threads=2"),
            (2, "offload=nvme optim.threads=1 offload.overlap=false io=threads"),
            (1, f"offload=nvme io=threads {halves}"),
            (1, "offload=host optim.threads=2"),
        )
    ):
        found = trained(tmp_path / str(number), *wide, f"offload.tile_numel={mi << 20}", *words.split())
        assert found.losses == plain.losses and found.digest == plain.digest, words
    assert plain.losses[0] != plain.losses[-1] and plain.steps[0].grad_norm > 0


def test_a_plain_loop_with_an_fp32_master_agrees_within_a_thousandth(one_rank):
    plain = plain_losses()
    for mine, theirs in zip(plain, one_rank["nvme"].losses, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3)


def initial_state():
    """The fp32 masters that a run begins with, by parameter name."""
    composed = compose.compose([*COMMON, "offload=none", f"run.steps={STEPS}", "run.dir=unused"])
    drafted = assemble.draft(composed)
    plan = planning.make(composed, drafted.model, Ranks(), drafted.step)
    with assemble.assembled(drafted, plan, composed, Ranks()) as ready:
        with torch.no_grad(), zero_core.gathered(ready.model, master=True):
            return {name: p.detach().float().clone() for name, p in ready.model.named_parameters()}


def plain_losses():
    """The slow twin's: bf16 parameters, fp32 masters, AdamW, clipping by the global norm, no sharding."""
    composed = compose.compose([*COMMON, f"run.steps={STEPS}", "run.dir=unused"])
    corpus, optim, rows = text.load(composed.data, composed.run.seed), composed.optim, composed.run.micro_batch
    model = causal_lm.build(composed.model, composed.data.sequence_length)
    model.load_state_dict(initial_state())

    def adamw(masters):
        decaying, others = ([m for m in masters if (m.dim() > 1) is decays] for decays in (True, False))
        groups = [{"params": decaying, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=optim.lr, betas=tuple(optim.betas), eps=optim.eps)

    def loss_of(model, batch):
        return cross_entropy(causal_lm.logits(model, batch[0]).flatten(0, 1), batch[1].flatten())

    plain, losses = Reference(model, adamw, param_dtype=torch.bfloat16, max_grad_norm=optim.max_grad_norm), []
    for number in range(1, STEPS + 1):
        for group in plain.optimizer.param_groups:
            group["lr"] = loop.learning_rate(optim, number, STEPS)
        first = (number - 1) * rows
        losses += plain.step([corpus.batch(first, rows, composed.data.sequence_length, composed.run.seed)], loss_of)
    return losses


@pytest.mark.promise("train-muon")
@pytest.mark.parametrize("words", ["run.steps=10", "run.steps=6 optim=muon optim.matrix_lr=0.01"])
def test_two_ranks_agree_over_tiers_and_nearly_with_one(ranks, tmp_path, one_rank, words):
    host, nvme = (
        ranks(2).run(trained, tmp_path / place, f"offload={place}", "run.micro_batch=1", *words.split())
        for place in ("host", "nvme")
    )
    for mine, theirs in zip(host, nvme, strict=True):
        assert mine.losses == theirs.losses == host[0].losses and mine.digest == theirs.digest
    # The same global batches as one rank with two rows; the schedule's length differs, so only the first steps compare.
    assert nvme[0].losses[0] == pytest.approx(one_rank["nvme"].losses[0], abs=2e-3)
    assert nvme[0].losses[-1] < nvme[0].losses[0]


@pytest.mark.parametrize("words", ["optim=adam", "optim=lion", "optim=adagrad", "optim=sgd", "precision=fp16"])
def test_other_optimizers_and_a_scaled_loss_agree_over_tiers(tmp_path, words):
    """adamw is what every other test runs. The device store rounds elsewhere, and Lion turns rounding into steps."""
    none, host, nvme = (
        trained(tmp_path / place, words, f"offload={place}", "run.steps=6") for place in ("none", "host", "nvme")
    )
    assert host.losses == nvme.losses and host.digest == nvme.digest
    assert none.losses == pytest.approx(host.losses, abs=1e-2)
    assert host.losses[-1] < host.losses[0]


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


DRAWER = """# @package _global_
offload:
  tiers:
    drawer:
      _target_: tests.conformance.zero_offload.test_new_tier.Drawer
      drawers: 65536
hardware:
  tiers:
    drawer: {gib: 0.5, read_gbps: 1, write_gbps: 1}
"""


PLACED = ("offload=host", "offload.parameters=drawer", "offload.optimizer={host: 0.5, drawer: 0.5}")


@pytest.fixture
def found(tmp_path):
    """The override that lets Hydra find the file."""
    (tmp_path / "conf" / "tier").mkdir(parents=True)
    (tmp_path / "conf" / "tier" / "drawer.yaml").write_text(DRAWER)
    return f"hydra.searchpath=[file://{tmp_path / 'conf'}]"


@pytest.mark.promise("tier-in-one-class", "compressed-memory")
@pytest.mark.parametrize("tier", ["drawer", "compressed"])
def test_a_file_and_a_class_are_a_tier_with_the_bits_of_host_memory(tmp_path, found, tier):
    """Fails if any package asked for a tier by name."""
    if tier == "compressed":
        pytest.importorskip("zstandard")
    all_there = ("offload=host", *(f"offload.{kind}={tier}" for kind in ("parameters", "gradients", "optimizer")))
    placed = PLACED if tier == "drawer" else all_there
    host = trained(tmp_path / "host", "offload=host", "run.steps=3")
    there = trained(tmp_path / "there", found, f"tier={tier}", *placed, "run.steps=3")
    assert there.losses == host.losses and there.digest == host.digest


@pytest.mark.advice("; change offload.nvme_paths or offload.tiers")
@pytest.mark.promise("unknown-tier")
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("offload.tiers.drawer.drawers=1",), "1 drawers of 512; change offload.nvme_paths or offload.tiers\n$"),
        (("offload.tiers.drawer._target_=no.such.Class",), "offload.tiers.drawer: No module named 'no'"),
        (("hardware.tiers.drawer.gib=0.0001",), "hardware.tiers.drawer.gib"),
        (("offload.optimizer=host", "offload.parameters=host"), "tier is given and not used with"),
    ],
)
def test_what_cannot_run_is_refused_by_one_line(tmp_path, found, capfd, words, text):
    code = app.main([*COMMON, found, "tier=drawer", *PLACED, *words, f"run.dir={tmp_path / 'run'}"])
    assert code == 2 and re.search(text, capfd.readouterr().err)


OWN = '''
import torch

class Normed(torch.optim.Optimizer):
    """Moves each parameter by its momentum over the momentum's norm."""

    def __init__(self, params, lr, weight_decay=0.0, scale=1.0):
        if isinstance(scale, str):
            raise ValueError(f"scale is {scale!r}")
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "scale": scale})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.sub_(mean / (mean.norm() + 1e-6), alpha=group["lr"] * group["scale"])

class Plain(Normed):
    """Has no weight decay."""

    def __init__(self, params, lr):
        super().__init__(params, lr)

class Open(Normed):
    """Takes any argument, and passes those that its base names."""

    def __init__(self, params, lr, **options):
        super().__init__(params, lr, **{"scale": 1.0, **{k: v for k, v in options.items() if k == "scale"}})

WORD = 3
'''


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the module `own_optimizers`, in which the run starts."""
    (tmp_path / "own_optimizers.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("own_optimizers", None)


WORDS = ("optim=own", "optim.target=own_optimizers:Normed", "optim.lr=0.1", "optim.options.scale=0.5")


OPEN = ("optim=own", "optim.target=own_optimizers:Open", "optim.lr=0.1", "optim.weight_decay=0")
ALONE = "optim.contract='by itself'"


@pytest.mark.promise("train-own-optimizer")
def test_it_learns_on_the_device_and_has_the_same_bits_on_host_and_nvme(here):
    none = trained(here / "none", "offload=none", *WORDS, "run.steps=30")
    host, nvme = (trained(here / at, f"offload={at}", *WORDS, ALONE, "run.steps=30") for at in ("host", "nvme"))
    assert host.losses == nvme.losses and host.digest == nvme.digest
    assert nvme.steps[-1].nvme_write_bytes > 0
    assert none.losses == pytest.approx(nvme.losses, abs=1e-3)
    assert sum(none.losses[-5:]) / 5 < none.losses[0] - 0.5


@pytest.mark.promise("train-own-optimizer")
@pytest.mark.advice("remove it from optim.options", "give arguments that it takes", "pass to shard() what step() does")
@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["optim=own"], "optim.target=None names no class: .*; write MODULE:CLASS"),
        (["optim=own", "optim.target=own_optimizers:No"], "names no class: .*; write MODULE:CLASS"),
        (["optim=own", "optim.target=own_optimizers:WORD"], "is not a class; write MODULE:CLASS"),
        ([*WORDS, "optim.options.sacle=1"], "names no argument sacle: remove it from optim.options"),
        ([*OPEN, "optim.options.sacle=1"], "names no argument sacle: remove it from optim.options"),
        ([*WORDS, "optim.options.scale=bad"], "scale is 'bad'; give arguments that it takes"),
        (["optim=own", "optim.target=own_optimizers:Plain"], "takes no weight_decay: set optim.weight_decay=0"),
        (
            [*WORDS, "offload=host"],
            'Normed has no .* offload=none.* what step.. does: optim.contract="by itself"',
        ),
    ],
)
def test_what_does_not_go_is_one_line(here, more, said):
    with pytest.raises(ConfigError, match=said):
        trained(here / "run", *more)
    if "Plain" in str(more):
        trained(here / "advised", *more, "optim.weight_decay=0", "optim.lr=0.1", "run.steps=1", "offload=none")
