"""What an error says when memory runs out in a step. Fails if it names no key, or one that would not help."""

import ast
import re

import pytest
import torch

from tests.unit.zero_offload.sizes import transformer
from zero_offload import Hardware, OffloadError, OutOfMemoryError, explained, plan

GPU = Hardware(device="cuda", device_gib=80, host_gib=512, nvme_gib=1000)
HERE = Hardware(host_gib=64, nvme_gib=1000)
LLAMA = transformer(layers=16, hidden_size=2048, intermediate_size=5632, gated=True, vocab_size=32000)
HOST = dict.fromkeys(("parameters", "gradients", "optimizer"), "host")
CUDA = (
    "CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 79.11 GiB of which 1.50 GiB is free. "
    "Including non-PyTorch memory, this process has 77.60 GiB memory in use. Of the allocated memory 70.25 GiB is "
    "allocated by PyTorch, and {fragments} is reserved by PyTorch but unallocated. If reserved but unallocated memory "
    "is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


def raised(planned, error):
    with pytest.raises(OutOfMemoryError) as caught, explained(planned):
        raise error
    assert caught.value.__cause__ is error
    return caught.value


def full(asked="2.00 GiB", fragments="512.00 MiB"):
    return torch.OutOfMemoryError(CUDA.format(asked=asked, fragments=fragments))


def test_it_says_what_was_asked_what_there_is_and_what_the_plan_gave():
    planned = plan(LLAMA, GPU, **HOST, activations="keep", tokens=32768)
    error = raised(planned, full())
    assert (error.tier, error.asked_bytes) == ("device", 2 << 30)
    text = str(error)
    assert "out of memory on the device tier: 2.0 GiB more were asked for" in text
    assert "70.2 GiB are in tensors, 0.5 GiB in fragments, 1.5 GiB are free" in text
    assert (
        f"zero_offload.plan expected {planned.total('device') / 2**30:.1f} GiB of a budget of 74.0 GiB (activations "
        in text
    )


@pytest.mark.parametrize(
    ("activations", "first"),
    [
        ("keep", 'activations="recompute"'),
        ("recompute", 'activations="host"'),
        ("host", "half the tokens a micro-batch"),
    ],
)
def test_activations_go_one_further_down(activations, first):
    given = {**HOST, "tokens": 32768, "prefetch_bytes": 1 << 30}
    text = str(raised(plan(LLAMA, GPU, **given, activations=activations), full()))
    assert text.split("save memory with ")[1].startswith(first)
    assert "or prefetch_bytes=0" in text
    assert "parameters=" not in text  # they are not on the device


def test_states_that_lie_on_the_device_are_named_with_what_they_are_worth():
    planned = plan(LLAMA, GPU, **dict.fromkeys(HOST, "device"), activations="recompute", tokens=2048)
    ways = str(raised(planned, full())).split("save memory with ")[1].split(", or ")
    states, all_of_them = 'optimizer="host" and gradients="host"', 'parameters="host" and optimizer="host" and gra'
    held = [planned.bytes_of("device", kind) / 2**30 for kind in ("optimizer", "gradients", "parameters")]
    assert ways[0].startswith(all_of_them) and ways[0].endswith(f"(saves {sum(held):.1f} GiB)")
    assert ways[1] == f"{states} (saves {sum(held[:2]):.1f} GiB)"  # a gradient is where its states are
    assert not any("gradients" in way for way in ways[2:])


@pytest.mark.promise("device-full")
@pytest.mark.parametrize(
    "given",
    [
        dict.fromkeys(HOST, "device") | {"activations": "keep", "tokens": 32768},
        HOST | {"activations": "keep", "tokens": 32768, "prefetch_bytes": 1 << 30},
        HOST | {"activations": "recompute", "tokens": 32768, "resident_bytes": 1 << 30},
        HOST | {"activations": "host", "tokens": 32768},
    ],
)
def test_each_way_out_takes_bytes_from_the_tier_when_it_is_followed(given):
    before = plan(LLAMA, GPU, **given)
    ways = re.sub(r" \([^)]*\)", "", str(raised(before, full())).split("save memory with ")[1]).split(", or ")
    for way in ways:
        arguments = [each.split("=") for each in way.split(" and ") if "=" in each]
        change = {name: ast.literal_eval(value) for name, value in arguments} or {"tokens": given["tokens"] // 2}
        assert arguments or way == "half the tokens a micro-batch"
        assert plan(LLAMA, GPU, **given | change).total("device") < before.total("device"), way


@pytest.mark.promise("device-full")
def test_memory_that_the_plan_counts_on_and_the_device_does_not_give_is_said():
    """Another process has it, or the card is smaller than it was said to be."""
    small = plan(LLAMA, GPU, **HOST, activations="recompute", tokens=2048)
    text = (
        "Tried to allocate 2.00 GiB. 10.00 GiB is allocated by PyTorch, 1.00 GiB is reserved by PyTorch but unallocated"
    )
    found = str(raised(small, torch.OutOfMemoryError(text)))
    assert "63.0 GiB of the budget are not available" in found and "end it" in found
    assert "device_gib=80: give its real size" in found
    assert "are not there" not in str(raised(small, full()))


def test_fragments_that_would_hold_it_come_first():
    planned = plan(LLAMA, GPU, **HOST, activations="host", tokens=2048)
    assert "save memory with PYTORCH_CUDA_ALLOC_CONF" in str(raised(planned, full("1.00 GiB", "3.00 GiB")))
    assert "ALLOC_CONF" not in str(raised(planned, full("1.00 GiB", "0.50 GiB")))


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 3221225472 bytes."), 3 << 30),
        (MemoryError(), None),
    ],
)
def test_on_the_cpu_device_and_host_are_one_tier(error, asked):
    planned = plan(LLAMA, HERE, **HOST, activations="recompute", tokens=2048)
    found = raised(planned, error)
    total = planned.total("device") + planned.total("host")
    assert (found.tier, found.asked_bytes) == ("host", asked)
    assert f"zero_offload.plan expected {total / 2**30:.1f} GiB of a budget of 63.4 GiB (optimizer " in str(found)
    assert 'save memory with optimizer="nvme"' in str(found)
    assert ("3.0 GiB more were asked for" if asked else "MemoryError; ") in str(found)


def test_other_errors_pass_as_they_are():
    planned = plan([1 << 20], GPU, **HOST)
    for error in (RuntimeError("shape mismatch"), OffloadError("mine"), KeyError("x")):
        with pytest.raises(type(error)) as caught, explained(planned):
            raise error
        assert caught.value is error
