"""Trains with the CPU optimizer alone, without the rest of this library.

python examples/cpu_optimizer.py

bf16 parameters have exact fp32 masters, as a 16-bit remainder beside each: the result is that of fp32 parameters,
rounded. torch's own AdamW on bf16 parameters loses steps that are smaller than a weight's last bit.
"""

import torch

import zero_optim_cpu


def trained(make, dtype: torch.dtype) -> torch.Tensor:
    """Returns a weight after 1000 steps of 1e-5, each far below the last bit of 1.0 in bf16."""
    weight = torch.nn.Parameter(torch.ones(64, dtype=dtype))
    optimizer = make([weight], lr=1e-5, weight_decay=0.0)
    for _ in range(1000):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    return weight.detach().float()


def main() -> None:
    print(f"kernels: {', '.join(zero_optim_cpu.available_isas())}; layouts: {', '.join(zero_optim_cpu.LAYOUTS)}")
    exact = trained(torch.optim.AdamW, torch.float32)
    ours = trained(zero_optim_cpu.AdamW, torch.bfloat16)
    theirs = trained(torch.optim.AdamW, torch.bfloat16)
    print(f"fp32, torch: {exact[0]:.4f}   bf16, zero_optim_cpu: {ours[0]:.4f}   bf16, torch: {theirs[0]:.4f}")
    assert torch.equal(ours, exact.bfloat16().float()) and torch.equal(theirs, torch.ones(64))


if __name__ == "__main__":
    main()
