"""Where the states live changes no bit: host and nvme exactly, the device store and a plain loop within rounding."""

import pytest
import torch
from torch.nn.functional import cross_entropy

import zero_core
from tests.integration.zero_train.helpers import COMMON, trained
from tests.reference import Reference
from zero_train.data import text
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


def test_host_and_nvme_agree_to_the_last_bit(one_rank):
    assert len(one_rank["host"].losses) == STEPS
    assert one_rank["host"].losses == one_rank["nvme"].losses
    assert one_rank["host"].digest == one_rank["nvme"].digest
    assert one_rank["nvme"].steps[-1].nvme_write_bytes > 0  # it did go through the disk
    assert one_rank["host"].steps[-1].nvme_write_bytes == 0


def test_the_device_store_agrees_within_a_thousandth(one_rank):
    for mine, theirs in zip(one_rank["none"].losses, one_rank["nvme"].losses, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-3)


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


@pytest.mark.promise("train-muon-experts")
def test_muon_trains_experts_in_groups_with_the_same_bits_on_host_and_nvme(tmp_path):
    """Uncut experts have gradients that differ by rounding, of which Muon in fp32 makes less."""
    words = ("model=moe", "optim=muon", "optim.matrix_lr=0.01", "optim.orthogonal=float32", "run.steps=12")
    cut = "zero.expert_bytes=1"
    host, nvme = (trained(tmp_path / place, f"offload={place}", *words, cut) for place in ("host", "nvme"))
    assert host.losses == nvme.losses and host.digest == nvme.digest
    uncut = trained(tmp_path / "uncut", "offload=host", *words, "zero.expert_bytes=null")
    assert host.losses == pytest.approx(uncut.losses, rel=0.02) and host.losses[-1] < host.losses[0] - 0.3
    adamw = trained(tmp_path / "adamw", "offload=nvme", "model=moe", "run.steps=3", cut)
    moved = [run.steps[2].nvme_write_bytes for run in (nvme, adamw)]
    assert moved[0] < 0.75 * moved[1], "matrices of experts keep one momentum"


@pytest.mark.promise("train-muon")
def test_two_ranks_own_matrices_with_the_same_bits_on_host_and_nvme(ranks, tmp_path):
    words = ("optim=muon", "optim.matrix_lr=0.01", "run.steps=6", "run.micro_batch=1")
    host, nvme = (ranks(2).run(trained, tmp_path / place, f"offload={place}", *words) for place in ("host", "nvme"))
    for mine, theirs in zip(host, nvme, strict=True):
        assert mine.losses == theirs.losses == host[0].losses and mine.digest == theirs.digest
    assert host[0].losses[-1] < host[0].losses[0]


def test_it_learns(one_rank):
    losses = one_rank["nvme"].losses
    assert losses[0] == pytest.approx(5.55, abs=0.15)  # ln 256
    assert sum(losses[-5:]) / 5 < losses[0] - 1


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


def test_two_ranks_agree_over_tiers_and_nearly_with_one(ranks, tmp_path, one_rank):
    results = {
        place: ranks(2).run(trained, tmp_path / place, f"offload={place}", "run.steps=10", "run.micro_batch=1")
        for place in ("host", "nvme")
    }
    for rank in range(2):
        assert results["host"][rank].losses == results["nvme"][rank].losses
        assert results["host"][rank].digest == results["nvme"][rank].digest
    assert results["nvme"][0].losses == results["nvme"][1].losses
    # The same global batches as one rank with two rows; the schedule's length differs, so only the first steps compare.
    assert results["nvme"][0].losses[0] == pytest.approx(one_rank["nvme"].losses[0], abs=2e-3)


@pytest.mark.parametrize("optim", ["adam", "lion", "adagrad", "sgd"])
def test_other_optimizers_agree_over_tiers(tmp_path, optim):
    """adamw is what every other test runs. The device store rounds elsewhere, and Lion turns rounding into steps."""
    runs = {
        place: trained(tmp_path / place, f"optim={optim}", f"offload={place}", "run.steps=6")
        for place in ("none", "host", "nvme")
    }
    assert runs["host"].losses == runs["nvme"].losses
    assert runs["host"].digest == runs["nvme"].digest
    assert runs["none"].losses == pytest.approx(runs["host"].losses, abs=1e-2)
    assert runs["host"].losses[-1] < runs["host"].losses[0]


def test_fp16_scales_its_loss(tmp_path):
    runs = [
        trained(tmp_path / place, "precision=fp16", f"offload={place}", "run.steps=6") for place in ("host", "nvme")
    ]
    assert runs[0].losses == runs[1].losses
    assert runs[0].digest == runs[1].digest
    assert runs[0].losses[-1] < runs[0].losses[0]


def test_the_instruction_set_changes_no_bit(tmp_path, monkeypatch):
    from zero_optim_cpu import available_isas

    found = {}
    for isa in available_isas():
        monkeypatch.setenv("ZERO_OPTIM_ISA", isa)
        run = trained(tmp_path / isa, "offload=host", "run.steps=12")
        found[isa] = (run.losses, run.digest)
    if len(found) == 1:
        pytest.skip(f"this processor has only {next(iter(found))}")
    assert len(set(found.values())) == 1, {isa: digest for isa, (_, digest) in found.items()}
