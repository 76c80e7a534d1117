"""optim=own: an optimizer of another package or of the user's, by its class, on each tier."""

import sys

import pytest

from tests.integration.zero_train.helpers import trained
from zero_train.errors import ConfigError

pytestmark = pytest.mark.promise("train-own-optimizer")

OWN = '''
import torch

class Normed(torch.optim.Optimizer):
    """Moves each parameter by its momentum over the momentum's norm."""

    def __init__(self, params, lr, weight_decay=0.0, scale=1.0):
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
ALONE = "optim.contract='by itself'"


def test_it_learns_on_the_device_and_has_the_same_bits_on_host_and_nvme(here):
    none = trained(here / "none", "offload=none", *WORDS, "run.steps=30")
    host, nvme = (trained(here / at, f"offload={at}", *WORDS, ALONE, "run.steps=30") for at in ("host", "nvme"))
    assert host.losses == nvme.losses and host.digest == nvme.digest
    assert nvme.steps[-1].nvme_write_bytes > 0
    assert none.losses == pytest.approx(nvme.losses, abs=1e-3)
    assert sum(none.losses[-5:]) / 5 < none.losses[0] - 0.5


@pytest.mark.advice("give arguments that it takes", "Here that key is optim.contract, and offload=none")
@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["optim=own"], "optim.target=None names no class: .*; write MODULE:CLASS"),
        (["optim=own", "optim.target=own_optimizers:No"], "names no class: .*; write MODULE:CLASS"),
        (["optim=own", "optim.target=own_optimizers:WORD"], "is not a class; write MODULE:CLASS"),
        ([*WORDS, "optim.options.sacle=1"], "unexpected keyword argument 'sacle'; give arguments that it takes"),
        (["optim=own", "optim.target=own_optimizers:Plain"], "takes no weight_decay: set optim.weight_decay=0"),
        ([*WORDS, "offload=host"], "Normed has no contract.*Here that key is optim.contract, and offload=none keeps"),
    ],
)
def test_what_does_not_go_is_one_line(here, more, said):
    with pytest.raises(ConfigError, match=said):
        trained(here / "run", *more)
    if "Plain" in str(more):
        trained(here / "advised", *more, "optim.weight_decay=0", "optim.lr=0.1", "run.steps=1", "offload=none")
