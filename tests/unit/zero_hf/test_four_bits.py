"""Experts in 4 bits: every result is that of bitsandbytes' whole stack, dequantised, bit for bit."""

import pytest

pytest.importorskip("bitsandbytes")

import bitsandbytes as bnb
import torch
from torch import Tensor, nn

from zero_hf.weights_4bit import BLOCK, FourBit, _Blocks, _Part

SHAPE = (4, 24, 16)  # an expert has 6 blocks: its bytes begin at no power of two


class Values:
    """A stack's values, as in a file. Counts what was read."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...] = SHAPE) -> None:
        self.whole = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        self.count = 0

    def read(self, start: int, stop: int) -> Tensor:
        self.count += stop - start
        return self.whole.reshape(-1)[start:stop].clone()


def quantised(dtype: torch.dtype = torch.float32, kind: str = "nf4") -> tuple[FourBit, Tensor]:
    """A stack in 4 bits, and bitsandbytes' dequantised values of the whole.

    Flat: on CPUs bitsandbytes 0.50.2 takes other scales where the last dimension is no multiple of 64.
    """
    experts = SHAPE[0]
    packed, state = bnb.functional.quantize_4bit(Values(dtype).whole.view(1, -1), blocksize=BLOCK, quant_type=kind)
    dense = bnb.functional.dequantize_4bit(packed, state).view(SHAPE)
    return FourBit(packed.view(experts, -1), state.absmax.view(experts, -1), kind, dtype, SHAPE), dense


@pytest.mark.promise("four-bit-experts")
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_views_show_the_same_bits_as_views_of_the_whole(kind, dtype):
    """Fails if a view takes another expert's bytes or scales, or a view of a view forgets where it began."""
    stack, dense = quantised(dtype, kind)
    views = {
        "whole": lambda t: t,
        "one": lambda t: t[2],
        "by a tensor": lambda t: t[torch.tensor(1)],
        "by several": lambda t: t[torch.tensor([3, 0, 3])],
        "by a table": lambda t: t[torch.tensor([[3, 0], [1, 1]])],
        "a run": lambda t: t[1:3],
        "a run of a run": lambda t: t[1:][1:3],
        "transposed": lambda t: t[1:3].transpose(-2, -1),
        "one of transposed": lambda t: t.transpose(1, 2)[3],
        "rows of one": lambda t: t[3][1:4],
        "every other": lambda t: t[::2],
        "flat": lambda t: t.view(-1)[70:300],
        "half of each": lambda t: t.chunk(2, dim=1)[1],
        "a column, twice": lambda t: t.unbind(2)[5].unsqueeze(-1).expand(4, 24, 2)[:, :12],
        "none": lambda t: t[2:2],
    }
    for name, view in views.items():
        shown, wanted = view(stack), view(dense)
        assert shown.shape == wanted.shape and shown.dtype == dtype, name
        assert torch.equal(shown + 0, wanted), name
        assert isinstance(shown, FourBit), name
    assert stack[2].packed.shape[0] == 1 and stack[1:3].packed.data_ptr() == stack.packed[1].data_ptr()


@pytest.mark.promise("four-bit-autograd")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autograd_keeps_bytes_and_gives_the_gradients_of_the_dense_stack(dtype):
    """Fails if dequantised values wait for backward, or a gradient differs in a bit."""
    stack, dense = quantised(dtype)
    kept = []
    for weight in (nn.Parameter(stack, requires_grad=False), dense):
        x = torch.randn(5, 16, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        saved: list[Tensor] = []

        def note(tensor: Tensor, saved: list[Tensor] = saved) -> Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            out = sum(nn.functional.linear(x * (e + 1), weight[torch.tensor(e)]).square().sum() for e in (0, 3))
            offs = torch.tensor([2, 2, 4, 5], dtype=torch.int32)
            out = out + nn.functional.grouped_mm(x, weight.transpose(-2, -1), offs=offs).square().sum()
            out = out + torch.bmm(weight[torch.tensor([1, 1, 2])], x[:3, :, None]).square().sum()
        out.backward()
        kept.append((out.detach(), x.grad, saved))
    (loss, gradient, saved), (wanted, wanted_gradient, _) = kept
    assert torch.equal(loss, wanted) and torch.equal(gradient, wanted_gradient)
    assert sum(isinstance(tensor, FourBit) for tensor in saved) == 4
    assert not [t for t in saved if not isinstance(t, FourBit) and t.numel() >= 24 * 16]


@pytest.mark.promise("four-bit-autograd")
def test_what_would_write_into_it_is_refused():
    stack, _ = quantised()
    for write in (lambda: stack.add_(1), lambda: stack[0].zero_(), lambda: torch.add(stack, 1, out=stack)):
        with pytest.raises(RuntimeError, match="a weight in 4 bits is frozen, and nothing can be written into it"):
            write()


@pytest.mark.promise("four-bit-experts")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_read_in_slices_are_the_bytes_and_scales_of_the_whole(dtype, monkeypatch):
    """Fails if a slice that begins inside a block is quantised with another scale, or a value is read twice."""
    monkeypatch.setattr("zero_hf.weights_4bit._TILE_NUMEL", 4 * BLOCK)
    values = Values(dtype)
    packed, state = bnb.functional.quantize_4bit(values.whole, blocksize=BLOCK, quant_type="nf4")
    blocks = _Blocks(values, dtype, "nf4")
    of_bytes, of_scales = _Part(blocks, "packed", BLOCK // 2), _Part(blocks, "absmax", 1)
    for start, stop in ((0, packed.numel()), (5, 6), (31, 33), (40, 500), (767, 768)):
        assert torch.equal(of_bytes.read(start, stop), packed.view(-1)[start:stop])
    for start, stop in ((0, 24), (7, 9), (23, 24), (3, 3)):
        assert torch.equal(of_scales.read(start, stop), state.absmax[start:stop])
    values.count = 0
    for expert in range(4):
        of_bytes.read(expert * 192, (expert + 1) * 192)
        assert torch.equal(of_scales.read(expert * 6, (expert + 1) * 6), state.absmax[expert * 6 : (expert + 1) * 6])
    assert values.count == values.whole.numel()
    of_bytes.read(64, 256)  # blocks 2 to 8, of which the scales are known
    assert torch.equal(of_scales.read(0, 12), state.absmax[:12])
    assert values.count == values.whole.numel() + 12 * BLOCK
