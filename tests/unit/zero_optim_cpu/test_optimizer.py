"""The stand-alone optimizers: torch.optim's semantics, groups, schedulers, closures and state dicts."""

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_optim_cpu
from tests.unit.zero_optim_cpu.tiles import same

pytestmark = pytest.mark.promise("cpu-optimizers")

SHAPES = ((33, 7), (1,), (0,), (300, 17), (5,))

TWINS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {"lr": 1e-2}),
    "adamw-options": ("AdamW", {"lr": 1e-2, "betas": (0.3, 0.9), "weight_decay": 0.3, "eps": 1e-4, "maximize": True}),
    "adam": ("Adam", {"lr": 1e-2}),
    "adam-decay": ("Adam", {"lr": 1e-2, "weight_decay": 0.1}),
    "adam-decoupled": ("Adam", {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "adagrad": ("Adagrad", {"lr": 0.1}),
    "adagrad-options": (
        "Adagrad",
        {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.5, "maximize": True},
    ),
    "sgd": ("SGD", {"lr": 0.1}),
    "sgd-decay": ("SGD", {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    "momentum": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "dampening": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    "nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
}


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def set_gradients(params: list[torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def train(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], seeds: range) -> list[Tensor]:
    for seed in seeds:
        set_gradients(params, seed)
        optimizer.step()
    return [p.detach().clone() for p in params]


def follows_torch(trained: Any) -> None:
    """trained(module, params): the parameters after a run with an optimizer of the module, ours or torch's."""
    ours, theirs = (trained(module, parameters()) for module in (zero_optim_cpu, torch.optim))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", TWINS)
def test_twenty_steps_follow_torch(kind: str) -> None:
    name, options = TWINS[kind]
    ours, theirs = parameters(), parameters(torch.float64)
    mine = getattr(zero_optim_cpu, name)(ours, **options)
    reference = getattr(torch.optim, name)(theirs, **options)
    got, wanted = train(mine, ours, range(20)), []
    for seed in range(20):
        set_gradients(ours, seed)
        for p, q in zip(ours, theirs, strict=True):
            q.grad = p.grad.double()
        reference.step()
    wanted = [p.detach().float() for p in theirs]
    for a, b, start in zip(got, wanted, parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)
        assert a.numel() == 0 or (a != start).any()


def test_a_lion_over_parameters_without_memory_has_them_and_refuses_its_own_step() -> None:
    p, q = (torch.nn.Parameter(torch.empty(2, device="meta")) for _ in range(2))
    optimizer = zero_optim_cpu.Lion.over([{"params": [p], "lr": 0.5}, {"params": [q]}], lr=0.1)
    assert [(group["params"], group["lr"]) for group in optimizer.param_groups] == [([p], 0.5), ([q], 0.1)]
    p.grad = torch.empty(2, device="meta")
    with pytest.raises(ValueError, match="on the meta device"):
        optimizer.step()


def test_param_groups_schedulers_and_missing_gradients() -> None:
    def trained(module: Any, params: Any) -> Any:
        groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.0, "lr": 0.05}]
        optimizer = module.AdamW(groups, lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
        for seed in range(6):
            set_gradients(params, seed)
            if seed % 2:
                params[3].grad = None
            optimizer.step()
            scheduler.step()
        assert int(optimizer.state[params[3]]["step"]) == 3
        return params

    follows_torch(trained)


def test_closure_runs_with_gradients_and_its_loss_is_returned() -> None:
    p = torch.nn.Parameter(torch.tensor([3.0]))
    optimizer = zero_optim_cpu.AdamW([p], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 9.0
    assert p.item() < 3.0


@pytest.mark.parametrize("layout", zero_optim_cpu.LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("copier", ["state_dict", "file", "deepcopy"])
def test_a_resumed_optimizer_continues_bit_for_bit(layout: str, dtype: torch.dtype, copier: str) -> None:
    params = parameters(dtype)
    optimizer = zero_optim_cpu.AdamW(params, lr=0.01, layout=layout)
    train(optimizer, params, range(3))
    if copier == "deepcopy":
        resumed, copies = copy.deepcopy((optimizer, params))
    else:
        copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
        resumed = zero_optim_cpu.AdamW(copies, lr=0.5, layout=layout)
        state = optimizer.state_dict()
        if copier == "file":
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            state = torch.load(file)
        resumed.load_state_dict(state)
    expected = train(optimizer, params, range(3, 6))
    for a, b in zip(train(resumed, copies, range(3, 6)), expected, strict=True):
        assert same(a, b)


def test_state_dicts_travel_to_and_from_torch() -> None:
    ours, theirs = parameters(), parameters()
    mine, reference = zero_optim_cpu.AdamW(ours, lr=0.01), torch.optim.AdamW(theirs, lr=0.01)
    train(mine, ours, range(3))
    train(reference, theirs, range(3))
    there = torch.optim.AdamW(copy.deepcopy(ours), lr=0.01)
    there.load_state_dict(mine.state_dict())
    train(there, there.param_groups[0]["params"], range(3, 5))
    back = zero_optim_cpu.AdamW(copy.deepcopy(theirs), lr=0.01)
    back.load_state_dict(reference.state_dict())
    train(back, back.param_groups[0]["params"], range(3, 5))
    expected = train(reference, theirs, range(3, 5))
    for optimizer in (there, back):
        for a, b in zip(optimizer.param_groups[0]["params"], expected, strict=True):
            torch.testing.assert_close(a.detach(), b, rtol=2e-6, atol=2e-6)


def test_fp32_moments_load_into_coarser_layouts() -> None:
    params = parameters()
    reference = torch.optim.AdamW(params, lr=0.01)
    train(reference, params, range(3))
    for layout in ("split_bf16m", "split_8bit"):
        copies = copy.deepcopy(params)
        optimizer = zero_optim_cpu.AdamW(copies, lr=0.01, layout=layout)
        optimizer.load_state_dict(reference.state_dict())
        assert optimizer.state[copies[3]]["exp_avg"].dtype != torch.float32
        assert optimizer.state[copies[3]]["step"] == 3


def test_states_of_another_layout_are_refused_by_name() -> None:
    params = parameters(torch.bfloat16)
    optimizer = zero_optim_cpu.AdamW(params, layout="split")
    train(optimizer, params, range(1))
    other = zero_optim_cpu.AdamW(parameters(torch.bfloat16), layout="fp32")
    with pytest.raises(ValueError, match="'remainder', which layout 'fp32' does not have"):
        other.load_state_dict(optimizer.state_dict())


def changed(p: torch.nn.Parameter, optimizer: Any, change: Callable[[Tensor], Tensor]) -> None:
    """The parameter, its gradient and its states."""
    p.data, p.grad = change(p.data), change(p.grad)
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[p][name] = change(optimizer.state[p][name])


def move_states(p: torch.nn.Parameter, optimizer: Any) -> None:
    """Other memory under the same tensors, as over a store that sleeps and wakes. The old memory stays, with zeros."""
    p.old = []
    for name in ("exp_avg", "exp_avg_sq"):
        state = optimizer.state[p][name]
        p.old.append(state.detach())
        state.set_(state.clone())
        p.old[-1].zero_()


DISTURBANCES: dict[str, Callable[[Any, Any], Any]] = {
    "moved": lambda p, o: setattr(p, "data", p.data.clone()),
    "gradient of other strides": lambda p, o: setattr(p, "grad", p.grad.T.contiguous().T),
    "states moved": move_states,
    "shrunk": lambda p, o: changed(p, o, lambda t: t.flatten()[:100]),
    "transposed": lambda p, o: changed(p, o, lambda t: t.T.contiguous()),
    "state dropped": lambda p, o: o.state.pop(p),
    "state replaced": lambda p, o: o.state.update({p: copy.deepcopy(o.state[p])}),
    "options": lambda p, o: o.param_groups[0].update(lr=0.3, weight_decay=0.5),
    "another group": lambda p, o: o.param_groups.__setitem__(0, {**o.param_groups[0], "lr": 0.2}),
    "no gradient": lambda p, o: setattr(p, "grad", None),
    "loaded": lambda p, o: o.load_state_dict(copy.deepcopy(o.state_dict())),
    "reordered": lambda p, o: o.param_groups[0]["params"].reverse(),
}


@pytest.mark.promise("moved-states")
@pytest.mark.parametrize("name", DISTURBANCES)
def test_what_changes_between_steps_is_followed_as_torch_does(name: str) -> None:
    def trained(module: Any, params: Any) -> Any:
        optimizer = module.AdamW(params, lr=0.01)
        train(optimizer, params, range(3))
        set_gradients(params, 3)
        DISTURBANCES[name](params[3], optimizer)
        optimizer.step()
        train(optimizer, params, range(4, 7))
        return params

    follows_torch(trained)


def test_a_group_and_a_momentum_that_are_added_between_steps() -> None:
    def trained(module: Any, params: Any) -> Any:
        optimizer = module.SGD(params[:3], lr=0.1)
        train(optimizer, params[:3], range(2))
        optimizer.add_param_group({"params": params[3:], "lr": 0.05})
        train(optimizer, params, range(2, 4))
        optimizer.param_groups[0].update(momentum=0.9, dampening=0.1)
        return train(optimizer, params, range(4, 7))

    follows_torch(trained)


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch keeps gradients in the parameter's dtype")
def test_a_gradient_of_another_dtype_is_noticed() -> None:
    results = []
    for changed in (False, True):
        params = parameters(torch.bfloat16)
        optimizer = zero_optim_cpu.AdamW(params)
        for p in params:
            p.grad_dtype = None  # any
        for seed in range(4):
            set_gradients(params, seed)
            if changed and seed % 2:  # the same numbers in another dtype: the same bits
                for p in params:
                    p.grad = p.grad.float()
            optimizer.step()
        results.append([p.detach() for p in params])
    assert all(same(a, b) for a, b in zip(*results, strict=True))


def test_a_parameter_turned_over_in_place_is_refused_by_name() -> None:
    params = parameters()
    optimizer = zero_optim_cpu.AdamW(params)
    train(optimizer, params, range(2))
    params[3].data = params[3].data.T  # the same address and size, other strides
    set_gradients(params, 2)
    with pytest.raises(ValueError, match=r"parameter of shape .* has strides .*contiguous"):
        optimizer.step()


def test_gradients_are_not_kept_alive() -> None:
    params = parameters()
    optimizer = zero_optim_cpu.AdamW(params)
    for seed in range(2):
        set_gradients(params, seed)
        optimizer.step()
    gradients = [weakref.ref(p.grad) for p in params]
    optimizer.zero_grad(set_to_none=True)
    gc.collect()
    assert all(gradient() is None for gradient in gradients)


def test_scale_and_nonfinite_count() -> None:
    params, others = parameters(), parameters()
    one, two = zero_optim_cpu.AdamW(params), zero_optim_cpu.AdamW(others)
    set_gradients(params, 0)
    for p, q in zip(params, others, strict=True):
        q.grad = p.grad * 1024
    one.step()
    two.step(scale=2.0**-10)
    assert all(same(p.detach(), q.detach()) for p, q in zip(params, others, strict=True))
    assert one.count_nonfinite() == 0
    params[0].grad[3, 3] = float("nan")
    params[3].grad[100:102, 5] = float("-inf")
    assert one.count_nonfinite() == 3
