"""save_state and load_state of zero_hf.Accelerator: resumed bit for bit, at another number of ranks, or refused."""

import json

import pytest
import torch
from accelerate.utils import ProjectConfiguration

from .accelerated import Script, accelerator, launched, llama, nvme

pytestmark = pytest.mark.promise("accelerate-resume")

SAVED_AFTER = 10  # batches, of which two make a step


def _run(zero, folder, resume, named):
    """What was saved or loaded, and losses and rates after it, of a run that goes on or of one that is resumed.

    The first: weights, rates, the number of batches in a step, a random number.
    """
    with launched():
        named_by_it = {"project_dir": folder, "automatic_checkpoint_naming": True, "total_limit": 2}
        options = {"project_config": ProjectConfiguration(**named_by_it)} if named else {}
        script = Script(zero, steps=7, **options)
        counted = Counted()
        script.accelerator.register_for_checkpointing(counted)
        where = None if named else f"{folder}/state"
        if resume:
            torch.manual_seed(99)
            script.accelerator.load_state(where)
            assert counted.value == 5
        else:
            script.train(stop=SAVED_AFTER)
            counted.value = 5
            script.accelerator.save_state(where)
        acc = script.accelerator
        weights = {name: tensor.tolist() for name, tensor in acc.get_state_dict(script.model).items()}
        found = weights, script.scheduler.get_last_lr(), acc.step, torch.rand(1).item()
        losses = script.train(skip=SAVED_AFTER)
        acc.free_memory()
        return found, losses, script.scheduler.get_last_lr()


class Counted:
    """An object of the script's own."""

    value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


@pytest.mark.parametrize(("world", "place"), [(1, "host"), (1, "nvme"), (2, "none")])
def test_a_resumed_run_goes_on_bit_for_bit(ranks, tmp_path, world, place):
    """Fails if a moment, a step count, a learning rate, a random state or the place in an accumulation is lost."""
    zero = nvme(tmp_path) if place == "nvme" else {"offload": place}
    went_on = ranks(world).run(_run, zero, str(tmp_path), False, place == "host")
    assert ranks(world).run(_run, zero, str(tmp_path), True, place == "host") == went_on


@pytest.mark.parametrize(("saved", "loaded"), [(2, 1), (1, 2)])
def test_a_run_is_resumed_at_another_number_of_ranks(ranks, tmp_path, saved, loaded):
    """Fails if a rank that the saved run had not takes up no step count, and updates at other batches."""
    before = ranks(saved).run(_run, {"offload": "host"}, str(tmp_path), False, False)[0][0]
    found = ranks(loaded).run(_run, {"stage": 2}, str(tmp_path), True, False)
    assert found[0][0] == before and {after[2] for after, *_ in found} == {before[2]}
    assert len({tuple(losses) for _, losses, _ in found}) == 1


def _two_models(folder, save):
    with launched():
        acc = accelerator({})
        actor, critic = llama(seed=1), llama(seed=2)
        one = torch.optim.AdamW(actor.parameters(), lr=1e-2)
        two = torch.optim.SGD(critic.parameters(), lr=1e-2, momentum=0.9)
        actor, critic, one, two = acc.prepare(actor, critic, one, two)
        seen = []
        acc.register_save_state_pre_hook(lambda models, weights, where: seen.append((len(models), len(weights))))
        acc.register_load_state_pre_hook(lambda models, where: seen.append(len(models)))
        if not save:
            acc.load_state(folder)
        for _ in range(2):
            for model, optimizer in ((actor, one), (critic, two)):
                acc.backward(model(input_ids=torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4).long()).loss)
                optimizer.step()
                optimizer.zero_grad()
            if save:
                acc.save_state(folder)
                save = False
        assert seen in ([(2, 2)], [2])
        states = acc.get_state_dict(actor), acc.get_state_dict(critic)
        acc.free_memory()
        return states


def test_two_models_and_hooks(tmp_path):
    """Fails if a model's shards go under the other's name, or a hook of the script does not see the models."""
    folder = str(tmp_path / "state")
    saved, resumed = _two_models(folder, save=True), _two_models(folder, save=False)
    for state, other in zip(resumed, saved, strict=True):
        assert not torch.equal(state["lm_head.weight"], other["lm_head.weight"])  # one step further
    assert {p.name for p in (tmp_path / "state").glob("zero*")} == {"zero.json", "zero_0", "zero_1"}


def test_what_is_not_trained_can_be_left_out(tmp_path):
    """Fails if a checkpoint of adapters takes the room of their base, or does not load without it."""
    with launched():
        acc, model = accelerator({}), llama()
        model.model.requires_grad_(False)
        model, optimizer = acc.prepare(model, torch.optim.AdamW(model.lm_head.parameters(), lr=1e-2))
        for folder, options in (("all", {}), ("head", {"trained_only": True})):
            acc.save_state(str(tmp_path / folder), **options)
        before = model.state_dict()["lm_head.weight"].clone()
        acc.backward(model(input_ids=torch.ones(1, 4).long(), labels=torch.ones(1, 4).long()).loss)
        optimizer.step()
        acc.load_state(str(tmp_path / "head"))
        assert torch.equal(model.state_dict()["lm_head.weight"], before)
        acc.free_memory()
    whole, head = (sum(f.stat().st_size for f in (tmp_path / f / "zero_0").rglob("*")) for f in ("all", "head"))
    assert whole - head > 4 * sum(p.numel() for p in llama().model.parameters()) // 2


def _saved(folder):
    with launched():
        script = Script({}, steps=1)
        script.accelerator.save_state(folder)
        script.accelerator.free_memory()


def _refused(folder, match):
    with launched():
        script = Script({}, steps=1)
        with pytest.raises(Exception, match=match):
            script.accelerator.load_state(folder)
        script.accelerator.free_memory()


def test_what_is_no_complete_save_is_refused(tmp_path):
    """Fails if shards of one save are loaded beside the schedulers and random states of another."""
    folder = tmp_path / "state"
    for name in ("state", "another"):
        _saved(str(tmp_path / name))
    (folder / "zero.json").write_text(json.dumps({"save": "a later one", "models": 1}))
    _refused(str(folder), "are of different saves.*Load another checkpoint, and use a new folder for each save")
    with launched():
        script = Script({}, steps=1)
        script.accelerator.load_state(str(tmp_path / "another"))
        assert len(script.train()) == 2
        script.accelerator.free_memory()
    (folder / "zero.json").write_text(json.dumps({"save": "a later one", "models": 2}))
    _refused(str(folder), "models: 2 in .* in this run. Prepare the same models, in the same order")
    (folder / "zero.json").unlink()
    way = r"Give a folder of save_state\(safe_serialization=True\), from a run that prepared the same models"
    _refused(str(folder), f"has no zero.json.*and lacks model.safetensors, optimizer.bin of accelerate. {way}")


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_of_stock_accelerate_goes_on_sharded(ranks, tmp_path, world):
    """Fails if a moment, a step count or a learning rate of stock accelerate's files is lost."""
    _, stock, rates = ranks(world).run(_run, None, str(tmp_path), False, False)[0]
    _, ours, own_rates = ranks(world).run(_run, {"offload": "host"}, str(tmp_path), True, False)[0]
    assert ours == pytest.approx(stock, rel=1e-5) and own_rates == rates
