"""A store is told which elements of which parameter each of its segments has.

Fails if a segment's `offset` is not where its rank's slice begins, or its `shape` is not the parameter's.
"""

import pytest
import torch

import zero_core
from tests.integration.zero_core import toys
from zero_core.layout import boxes
from zero_core.optim.device_store import DeviceStore


class Listening(DeviceStore):
    def attach(self, shards, *args, **options):
        self.specs = list(shards)
        super().attach(shards, *args, **options)


def rebuild() -> int:
    """Reads every segment of this rank where its parameter has it; returns how many begin within one."""
    torch.manual_seed(0)
    model, store = toys.Stack(), Listening()
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = zero_core.shard(model, toys.adamw(model.parameters()), store=store)
    for i, spec in enumerate(store.specs):
        master = store.read_state(i, "master", 0, spec.numel)
        for segment in spec.segments:
            parameter, stop = whole[segment.name], segment.offset + segment.stop - segment.start
            assert segment.shape == parameter.shape
            assert torch.equal(master[segment.start : segment.stop], parameter.flatten()[segment.offset : stop])
            for box in boxes(segment.shape, segment.offset, stop):
                where = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
                first = segment.start + box.start - segment.offset
                assert torch.equal(master[first : first + box.numel].view(box.sizes), parameter[where])
    within = sum(segment.offset > 0 for spec in store.specs for segment in spec.segments)
    optimizer.close()
    return within


@pytest.mark.promise("segments")
def test_a_segment_says_which_elements_of_which_shape_it_has(ranks) -> None:
    assert ranks(1).run(rebuild) == [0]
    assert sum(ranks(2).run(rebuild)) > 0
