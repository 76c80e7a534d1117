"""The cells of LSTM and GRU, which torch asks of every accelerator as one kernel and has none of for the CPU."""

from __future__ import annotations

import torch
from torch import Tensor


def lstm_cell(
    input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, input_bias: Tensor | None, hidden_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the next hidden state, the next cell state, and the gates (batch, 4 x hidden) for the backward."""
    gates = input_gates + hidden_gates
    if input_bias is not None and hidden_bias is not None:
        gates = gates + input_bias + hidden_bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the gradients of the gates, of the cell state, and of either bias."""
    i, f, g, o = workspace.chunk(4, 1)
    grad_hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    bent = cy.tanh()
    cell = grad_hy * o * (1 - bent * bent)
    if grad_cy is not None:
        cell = cell + grad_cy
    parts = [cell * g * i * (1 - i), cell * cx * f * (1 - f), cell * i * (1 - g * g), grad_hy * bent * o * (1 - o)]
    gates = torch.cat(parts, 1)
    return gates, cell * f, gates.sum(0) if has_bias else None


def gru_cell(
    input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, input_bias: Tensor | None, hidden_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the next hidden state, and what the backward needs (batch, 5 x hidden)."""
    if input_bias is not None and hidden_bias is not None:
        input_gates, hidden_gates = input_gates + input_bias, hidden_gates + hidden_bias
    (ir, iz, i_new), (hr, hz, h_new) = input_gates.chunk(3, 1), hidden_gates.chunk(3, 1)
    reset, update = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    new = (i_new + reset * h_new).tanh()
    return new + update * (hx - new), torch.cat([reset, update, new, hx, h_new], 1)


def gru_cell_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of both gates, of the hidden state, and of both biases."""
    reset, update, new, hx, h_new = workspace.chunk(5, 1)
    z = grad_hy * (hx - new) * update * (1 - update)
    n = grad_hy * (1 - update) * (1 - new * new)
    r = n * h_new * reset * (1 - reset)
    inputs, hiddens = torch.cat([r, z, n], 1), torch.cat([r, z, n * reset], 1)
    return inputs, hiddens, grad_hy * update, *((inputs.sum(0), hiddens.sum(0)) if has_bias else (None, None))


_library = torch.library.Library("aten", "IMPL")
for _name, _function in (
    ("_thnn_fused_lstm_cell", lstm_cell),
    ("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward),
    ("_thnn_fused_gru_cell", gru_cell),
    ("_thnn_fused_gru_cell_backward", gru_cell_backward),
):
    _library.impl(_name, _function, "PrivateUse1")
