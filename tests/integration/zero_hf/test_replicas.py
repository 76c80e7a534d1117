"""`replicas` of ZeroConfig: groups of ranks that each hold all shards train, evaluate and save as one group does.

What would have to break: a gradient that is averaged over a group only, a batch that is split within a group only, or a
checkpoint of several copies.
"""

import os
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

import zero_core
import zero_hf
from tests import kit
from tests.integration.zero_hf.trainers import Sharded, launched, llama, train
from zero_hf import ConfigError, ZeroConfig

GIVEN = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "data": 33}


def _in_groups(folder, zero, steps, resume=None):
    with launched():
        made, logs = train(Sharded, folder, zero=zero, resume=resume, max_steps=steps, **GIVEN)
        text, group = made.zero_run.describe(), zero_core.handle(made.model).ranks.shard.group
        members = torch.distributed.get_process_group_ranks(group)
        made.save_model(str(folder / "final"))
        made.zero_run.close()
        return logs.losses, logs.norms, logs.evaluations, members, text


@pytest.mark.promise("replicas")
@pytest.mark.parametrize("zero", [{"stage": 1}, {"offload": "host", "stage": 3}])
def test_a_trainer_in_groups_logs_what_it_does_in_one(ranks, tmp_path, zero):
    """Also when each goes on from a checkpoint of the other. In fp32, up to the order of sums."""
    found = {}
    for replicas, name in ((1, "one"), (2, "two")):
        found[name] = ranks(4).run(_in_groups, tmp_path / name, zero | {"replicas": replicas}, 4)
    for rank in range(4):
        one, two = found["one"][rank], found["two"][rank]
        assert two[3] == [rank // 2 * 2, rank // 2 * 2 + 1] and one[3] == [0, 1, 2, 3]
        assert "on 4 ranks in 2 groups, of each:" in two[4] and "on 4 ranks, of each:" in one[4]
        for ours, theirs in zip(two[:3], one[:3], strict=True):
            assert ours and ours == pytest.approx(theirs, rel=1e-4)
    whole = found["one"][0]
    for name, replicas in (("one", 2), ("two", 1)):
        checkpoint, folder = str(tmp_path / name / "checkpoint-2"), tmp_path / f"on_{name}"
        rest = ranks(4).run(_in_groups, folder, zero | {"replicas": replicas}, 4, checkpoint)[0]
        assert rest[0][-2:] == pytest.approx(whole[0][2:], rel=1e-4)
        finals = [AutoModelForCausalLM.from_pretrained(each / "final") for each in (folder, tmp_path / "one")]
        ours, theirs = (dict(each.state_dict()) for each in finals)
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.promise("replicas")
@kit.on_ranks(2)
def test_groups_that_cannot_be_are_refused_and_the_way_out_works():
    def sharded(config, **options):
        model = llama()
        zero_hf.shard(model, torch.optim.AdamW(model.parameters()), config, **options).close()

    with pytest.raises(ConfigError, match=r"replicas=3 does not divide 2 ranks .*: start a multiple of"):
        sharded(ZeroConfig(replicas=3))
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 1))
    with pytest.raises(ConfigError, match=r"mesh= and replicas=2 both say .* leave one out"):
        sharded(ZeroConfig(replicas=2), mesh=mesh)
    sharded(ZeroConfig(replicas=2))
    sharded(ZeroConfig(), mesh=mesh)
    with pytest.raises(ConfigError, match=r"stage=0 shards nothing: write replicas: 1, or stage: 1, 2 or 3"):
        ZeroConfig(stage=0, replicas=2)
    ZeroConfig(stage=0, replicas=1)
    ZeroConfig(stage=1, replicas=2)
    durable = {"durable": "process", "offload": "host", "nvme_paths": "/x"}
    with pytest.raises(ConfigError, match=r"keeps one group's steps: write replicas: 1, or leave durable out"):
        ZeroConfig(replicas=2, **durable)
    ZeroConfig(replicas=1, **durable)
    ZeroConfig(replicas=2, offload="host")


def _on_machines(folder, second):
    """Two machines of two ranks each, as torchrun tells it."""
    machine = {"GROUP_RANK": str(torch.distributed.get_rank() // 2), "LOCAL_WORLD_SIZE": "2"}
    with launched(), mock.patch.dict(os.environ, machine):
        made, logs = train(Sharded, folder, zero={"secondary_shards": second}, max_steps=3, data=33)
        planned = made.zero_run.plan.bytes_of("device", "buffers")
        made.zero_run.close()
    return logs.losses, planned


@pytest.mark.promise("secondary-shards")
def test_secondary_shards_of_a_trainer_are_planned_and_train_the_same(ranks, tmp_path):
    (losses, planned), (others, more) = (ranks(4).run(_on_machines, tmp_path / str(on), on)[0] for on in (False, True))
    assert losses == others and more > planned
    with pytest.raises(ValueError, match=r"is for stage 3 on several machines .* has stage=2, .*: leave it out"):
        zero_hf.shard(torch.nn.Linear(2, 2), None, ZeroConfig(stage=2, secondary_shards=True))
