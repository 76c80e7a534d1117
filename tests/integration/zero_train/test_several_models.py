"""Two models in one process, on one path and one budget of host memory: a GAN.

Fails if stores on one path or two engines in one backward meet, if a store takes another one's memory, or if finding no
room for one reaches the other.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import zero_core
import zero_nvme
from tests import kit
from tests.chunks import TILE
from tests.integration.zero_nvme.faults import small_ext4
from tests.integration.zero_train.test_real_faults import fill
from zero_offload import HostBudget, TieredStore

pytestmark = [pytest.mark.usefixtures("small_chunks"), pytest.mark.promise("several-models")]

KINDS = ("parameters", "gradients", "optimizer")
WIDTH, ROUNDS = 48, 3


def net(numel_in: int, numel_out: int) -> nn.Sequential:
    wide = 4 * WIDTH
    return nn.Sequential(
        nn.Linear(numel_in, wide), nn.LeakyReLU(0.2), nn.Linear(wide, wide), nn.Tanh(), nn.Linear(wide, numel_out)
    )


class Gan:
    """Generator and discriminator. `stores`: where each is kept; None: plain torch."""

    def __init__(self, stores: tuple[Any, Any] | None) -> None:
        torch.manual_seed(0)
        self.generator, self.discriminator = net(8, WIDTH), net(WIDTH, 1)
        # Multiples of powers of two are exact, so no order of multiplying and adding rounds otherwise than torch's.
        self.optimizers: list[Any] = [
            torch.optim.SGD(model.parameters(), lr=2**-5, momentum=0.5)
            for model in (self.generator, self.discriminator)
        ]
        if stores is not None:
            pairs = zip((self.generator, self.discriminator), self.optimizers, stores, strict=True)
            self.optimizers = [
                zero_core.shard(model, optimizer, store=store, units=(nn.Linear,)) for model, optimizer, store in pairs
            ]
        self.random = torch.Generator().manual_seed(1)

    def judge(self, samples: Tensor, label: float) -> Tensor:
        found = self.discriminator(samples)
        return binary_cross_entropy_with_logits(found, torch.full_like(found, label))

    def train_discriminator(self) -> Tensor:
        real, noise = torch.randn(4, WIDTH, generator=self.random), torch.randn(4, 8, generator=self.random)
        with torch.no_grad():
            fake = self.generator(noise)
        loss = self.judge(real, 1.0) + self.judge(fake, 0.0)
        return self.step(1, loss)

    def train_generator(self) -> Tensor:
        """Its gradient comes through the discriminator, which gets one too and forgets it."""
        loss = self.judge(self.generator(torch.randn(4, 8, generator=self.random)), 1.0)
        self.step(0, loss)
        self.optimizers[1].zero_grad()
        return loss.detach()

    def step(self, which: int, loss: Tensor) -> Tensor:
        return kit.step(self.optimizers[which], loss)

    def values(self, model: nn.Module) -> list[Tensor]:
        with torch.no_grad():
            if "_zero_handle" not in model.__dict__:
                return [parameter.clone() for parameter in model.parameters()]
            return kit.values(model)

    def close(self) -> None:
        for optimizer in self.optimizers:
            optimizer.close()


def trained(stores: tuple[Any, Any] | None, *, sleeps: bool = False) -> list[Tensor]:
    gan, seen = Gan(stores), []
    for _ in range(ROUNDS):
        seen.append(gan.train_discriminator())
        seen.append(gan.train_generator())
        if sleeps:
            for model in (gan.generator, gan.discriminator):
                zero_core.sleep(model)
            for model in (gan.discriminator, gan.generator):
                zero_core.wake(model)
    seen += gan.values(gan.generator) + gan.values(gan.discriminator)
    if stores is not None:
        gan.close()
    return seen


@pytest.fixture(scope="module")
def plain() -> list[Tensor]:
    return trained(None)


def store_on(slab: Any, placement: Any, **options: Any) -> TieredStore:
    return TieredStore(nvme=slab, tile_numel=TILE, **dict.fromkeys(KINDS, placement), **options)


@pytest.mark.promise("two-runs-one-path")
@pytest.mark.parametrize("places", ["host host", "nvme nvme", "host nvme", "nvme another", "sleep sleep"])
def test_a_gan_on_one_path_and_one_budget_has_the_bits_of_plain_torch(tmp_path, plain, places) -> None:
    """Both on one slab, or the second on a slab of its own in the same folder, as another run's."""
    budget = HostBudget(64 << 20)
    with zero_nvme.Slab(tmp_path, allow_memory=True) as slab, zero_nvme.Slab(tmp_path, allow_memory=True) as another:
        tiers = {"another": "nvme", "sleep": {"host": 0.5, "nvme": 0.5}}
        found = trained(
            tuple(
                store_on(another if place == "another" else slab, tiers.get(place, place), host_bytes=budget)
                for place in places.split()
            ),
            sleeps="sleep" in places,
        )
        assert budget.free_bytes == budget.nbytes
    assert not list(tmp_path.iterdir()), "a slab has no name: there is nothing that another run could delete or find"
    assert all(map(torch.equal, found, plain))


@pytest.mark.promise("full-slab")
def test_a_second_model_that_finds_no_room_leaves_the_first_alone(tmp_path, plain) -> None:
    """On a small ext4: neither its shard() nor a sleep() that finds no room takes anything from the first."""
    with small_ext4(tmp_path, 16 << 20) as mount, zero_nvme.Slab(mount) as slab:
        gan = Gan((store_on(slab, "nvme"), store_on(slab, {"host": 1.0})))
        losses = [gan.train_discriminator(), gan.train_generator()]
        fill(mount)
        torch.manual_seed(0)
        other = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 512))
        first = [parameter.detach().clone() for parameter in other.parameters()]
        with pytest.raises(OSError, match=f"{mount} has .* bytes free"):
            zero_core.shard(other, torch.optim.AdamW(other.parameters()), store=store_on(slab, "nvme"))
        assert all(map(torch.equal, other.parameters(), first))
        with pytest.raises(OSError, match=r"sleep\(\) failed: .*the store is awake and has lost nothing"):
            zero_core.sleep(gan.discriminator)
        for _ in range(ROUNDS - 1):
            losses += [gan.train_discriminator(), gan.train_generator()]
        values = gan.values(gan.generator) + gan.values(gan.discriminator)
        gan.close()
    assert all(map(torch.equal, [*losses, *values], plain))
