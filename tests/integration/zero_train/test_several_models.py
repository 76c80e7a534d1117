"""Two models in one process, on one slab and one budget of host memory: a GAN; a policy and its reference.

Fails if stores on one slab or two engines in one backward meet, if a store takes another one's memory, or if closing
one, or finding no room for one, reaches the other.
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
from zero_offload import BudgetError, HostBudget, TieredStore

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


@pytest.mark.parametrize("placements", [("host", "host"), ("nvme", "nvme"), ("host", "nvme"), ("sleep", "sleep")])
def test_a_gan_on_one_slab_and_one_budget_has_the_bits_of_plain_torch(tmp_path, plain, placements) -> None:
    budget = HostBudget(64 << 20)
    with zero_nvme.Slab(tmp_path, allow_memory=True) as slab:
        kinds = [{"parameters": "host", "optimizer": "nvme"} if each == "sleep" else each for each in placements]
        stores = tuple(
            TieredStore(nvme=slab, tile_numel=TILE, host_bytes=budget, **kind)
            if isinstance(kind, dict)
            else store_on(slab, kind, host_bytes=budget)
            for kind in kinds
        )
        found = trained(stores, sleeps="sleep" in placements)
        assert budget.free_bytes == budget.nbytes
    assert all(map(torch.equal, found, plain))


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_one_store_may_close_while_the_other_goes_on(tmp_path, placement) -> None:
    plain = Gan(None)
    budget = HostBudget(64 << 20)
    with zero_nvme.Slab(tmp_path, allow_memory=True) as slab:
        gan = Gan(tuple(store_on(slab, placement, host_bytes=budget) for _ in range(2)))
        for each in (plain, gan):
            each.train_discriminator()
            each.train_generator()
        left = budget.free_bytes
        gan.optimizers[1].close()
        assert budget.free_bytes > left
        noise = torch.ones(4, 8)
        for _ in range(2):
            losses = [each.step(0, each.generator(noise).square().mean()) for each in (plain, gan)]
            assert torch.equal(*losses)
        assert all(map(torch.equal, gan.values(gan.generator), plain.values(plain.generator)))
        gan.optimizers[0].close()


def preferred(placement: str | None, slab: Any = None, budget: Any = None, *, sleeps: bool = False) -> list[Tensor]:
    """Three steps of direct preference optimization: a policy, and the frozen model that it began as."""
    torch.manual_seed(0)
    policy, reference = net(8, WIDTH), net(8, WIDTH)
    reference.load_state_dict(policy.state_dict())
    optimizer: Any = torch.optim.SGD(policy.parameters(), lr=2**-3, momentum=0.5)
    if placement is not None:
        on = {"units": (nn.Linear,)}
        optimizer = zero_core.shard(policy, optimizer, store=store_on(slab, placement, host_bytes=budget), **on)
        frozen = zero_core.shard(reference, store=store_on(slab, placement, host_bytes=budget), **on)
    random, seen = torch.Generator().manual_seed(1), []
    for _ in range(3):
        prompts, chosen, rejected = (torch.randn(4, width, generator=random) for width in (8, WIDTH, WIDTH))
        with torch.no_grad():
            before = reference(prompts)
        if sleeps:  # the reference makes room for the policy's step
            zero_core.sleep(reference)
        margin = (policy(prompts) - before) * (chosen - rejected)
        loss = -torch.nn.functional.logsigmoid(margin.sum(1)).mean()
        kit.step(optimizer, loss)
        if sleeps:
            zero_core.wake(reference)
        seen.append(loss.detach())
    with torch.no_grad():
        seen += [policy(torch.ones(8)), reference(torch.ones(8))]
    if placement is not None:
        optimizer.close()
        frozen.close()
    return seen


@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_a_policy_and_its_reference_have_the_bits_of_plain_torch(tmp_path, placement, sleeps) -> None:
    budget = HostBudget(64 << 20)
    with zero_nvme.Slab(tmp_path, allow_memory=True) as slab:
        found = preferred(placement, slab, budget, sleeps=sleeps)
    assert budget.free_bytes == budget.nbytes
    assert all(map(torch.equal, found, preferred(None)))


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


def test_a_second_model_beyond_the_budget_is_refused_until_the_first_sleeps(tmp_path) -> None:
    with zero_nvme.Slab(tmp_path, allow_memory=True) as slab:
        budget = HostBudget(1 << 20)
        models = [net(8, WIDTH), net(8, WIDTH)]

        def shard(k: int) -> Any:
            store = store_on(slab, "host", host_bytes=budget)
            return zero_core.shard(models[k], torch.optim.AdamW(models[k].parameters()), store=store)

        optimizers = [shard(0)]
        with pytest.raises(BudgetError, match=r"Other stores have .* of the shared budget of 1.0 MiB: sleep\(\)"):
            shard(1)
        zero_core.sleep(models[0])
        optimizers.append(shard(1))
        models[1](torch.ones(8)).sum().backward()
        optimizers[1].step()
        zero_core.sleep(models[1])
        zero_core.wake(models[0])
        models[0](torch.ones(8)).sum().backward()
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.close()
        assert budget.free_bytes == budget.nbytes
