"""precision=auto: bf16 only where the device computes in it, and a layout that goes with it."""

import pytest
import torch

from zero_train.model import dtypes
from zero_train.settings import compose

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def resolved(tmp_path, device, flags, *overrides):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\n{flags}\n")
    composed = compose.compose(["recipe=tiny", "run.dir=x", *overrides])
    reason = dtypes.resolve(composed, device, cpuinfo)
    return composed.precision.parameters, composed.precision.states, reason


@pytest.mark.parametrize(
    ("device", "flags", "expected"),
    [
        (CPU, "flags\t\t: fpu avx512f", ("fp32", "fp32")),
        (CPU, "flags\t\t: fpu avx512_bf16", ("bf16", "split")),
        (CPU, "Features\t: fp asimd bf16", ("bf16", "split")),
        (CPU, "", ("fp32", "fp32")),
        (GPU, "flags\t\t: fpu", ("bf16", "split")),
    ],
)
def test_auto_follows_the_device(tmp_path, device, flags, expected):
    parameters, states, reason = resolved(tmp_path, device, flags)
    assert (parameters, states) == expected
    assert reason.startswith(parameters)


@pytest.mark.promise("device-bf16")
@pytest.mark.parametrize(("computes", "expected"), [(True, "bf16"), (False, "fp32")])
def test_auto_asks_the_device_whether_it_computes_in_bf16(tmp_path, monkeypatch, computes, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated=True: emulated or computes)
    assert resolved(tmp_path, GPU, "")[0] == expected
    assert resolved(tmp_path, CPU, "", "run.dry=true", "hardware.device=cuda")[0] == "bf16"  # described, not asked
