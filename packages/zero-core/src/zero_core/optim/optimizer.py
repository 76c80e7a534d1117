"""Implements `ShardedOptimizer`, the torch optimizer that `shard` returns. `step()` is norm, coefficient, update.

Owns the parameter groups, the counting of steps and the clipping. The store owns gradients and states.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..active_calls import in_backward, mended
from ..errors import GradientError, UnsupportedOptimizerError, ZeroError
from ..gradients.loss_scaling import Scaled
from ..hooks.engine import Engine
from ..unit_memory.unit_gradient import Leftover
from .backward_updates import UpdatesInBackward
from .contracts import NOTES, described, frozen, is_together
from .full_states import INSTEAD, States, gather_states, put_back, refuse_busy
from .joint import joined_states, kind_of, members_of
from .single_parameter import Double
from .state_names import Options

_not_traced = torch.compiler.disable(
    reason="the step of a sharded optimizer works on shards, which cannot be compiled: leave fullgraph=True out, or "
    "call step() outside of what is compiled"
)


_STATE_DICT_HOOKS = [f"_optimizer_{on}state_dict_{when}_hooks" for on in ("", "load_") for when in ("pre", "post")]


def _run_hooks(optimizers: Sequence[Optimizer], name: str, sharded: Optimizer, args: Any, kwargs: Any) -> Any:
    """Hooks that the user registered, around the sharded optimizer's step(). optimizers: the user's, then the members
    of a joint one. Their hooks are given the member, which has its own parameters alone, as when it steps itself."""
    for each in optimizers:
        for hook in list(getattr(each, name).values()):
            returned = hook(sharded if each is optimizers[0] else each, args, kwargs)
            args, kwargs = (args, kwargs) if returned is None else returned
    return args, kwargs


class ShardedOptimizer(Optimizer):
    """Takes the place of the user's optimizer. LR schedulers are built on this one; `param_groups` are live.

    grad_norm: global L2 norm of the last step's gradients, before clipping; float, nan before the first step.
    max_grad_norm: step() clips the global norm to it; None: it does not clip. May be changed between steps.
    """

    def __init__(
        self, optimizer: Optimizer, engine: Engine, updates: UpdatesInBackward | None, max_grad_norm: float | None
    ) -> None:
        self._sealed = False
        super().__init__([dict(group) for group in optimizer.param_groups], optimizer.defaults)
        hooked = list(dict.fromkeys((optimizer, *members_of(optimizer))))
        self.register_step_pre_hook(partial(_run_hooks, hooked, "_optimizer_step_pre_hooks"))
        self.register_step_post_hook(partial(_run_hooks, hooked, "_optimizer_step_post_hooks"))
        for name in _STATE_DICT_HOOKS:
            if any(getattr(each, name, None) for each in hooked[1:]):
                raise UnsupportedOptimizerError(
                    f"optimizer {kind_of(optimizer)} has one state dict of all its members, and a hook on the state "
                    "dict of one would not be called: register it on the optimizer that zero_core.shard returns"
                )
            setattr(self, name, getattr(optimizer, name, OrderedDict()))
        self.param_groups = optimizer.param_groups  # the same objects: a scheduler on the old one still works
        self.engine, self.max_grad_norm = engine, max_grad_norm
        self.grad_norm = math.nan
        self.step_count = max((max(u.steps, default=0) for u in engine.units), default=0)  # steps carried over
        self._updates = updates
        self._joint, self._kind = len(members_of(optimizer)) > 1, kind_of(optimizer)
        self._options = Options(optimizer, self.param_groups, engine.ranks.device)
        self.double = Double(optimizer, engine.ranks.device)
        self._by_itself, self._together = bool(self.double), is_together(optimizer)
        if updates is not None:
            if self._by_itself or self._together:
                raise UnsupportedOptimizerError(
                    f"update_in_backward=True needs a step() that updates each element alone. If that of {self._kind} "
                    'does, pass optimizer_contract="elementwise" to zero_core.shard. Else leave update_in_backward out'
                )
            updates.options = self._options
        self.state: Any = States()
        self._options.seal(self.state)
        self._sealed = True

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises for what copies of the given optimizer have, and its class may read in step()."""
        theirs = name in ("param_groups", "state", "defaults") or not (hasattr(self, name) or name in NOTES)
        if getattr(self, "_sealed", False) and theirs:
            self._options.refuse_assigned(name)
        super().__setattr__(name, value)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the values of `loss`, of any shape. Their backward multiplies gradients by the loss scale.

        Without `loss_scale=` it returns `loss` itself. step(), p.grad and full_gradient divide the parameters'
        gradients again. Other gradients, as that of an input, stay multiplied. With `loss_scale=`, the backward of a
        loss that was not scaled raises GradientError.
        """
        scale = self.engine.loss_scale
        return loss if scale is None else Scaled.apply(loss, scale)

    @_not_traced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the user's optimizer on every parameter that any rank used since the last step. Consumes gradients.

        Raises GradientError when the norm is not finite and there is no loss scaling: no parameter is updated then, and
        the gradients are gone. Collective: every rank calls it.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        self._step()
        return loss

    @mended
    @torch.no_grad()
    def _step(self) -> None:
        engine = self.engine
        engine.calls.begin("step")
        try:
            engine.refuse_over("step()")
            if engine.busy:
                raise ZeroError("step() inside forward or backward: call it after loss.backward() returned")
            if engine.store.asleep:  # before gradients that wait on this rank are reduced
                raise ZeroError("step() while the store sleeps: call zero_core.wake(model)")
            self._options.check()
            engine.writes.check_given(stepping=True)
            engine.settle()
            if engine.commits is not None:
                engine.commits.begin_step()
            engine.reducer.refuse_stepped()
            options = described(self.param_groups, self.max_grad_norm) if engine.ranks.shard.size > 1 else ""
            engine.reducer.reduce_kept()
            if self._updates is not None:
                self.grad_norm = engine.reducer.norm(self._updates.squared, options)
                self._updates.finish()
                self._count()
                return
            factor = engine.gradients.take_factor()
            self.grad_norm = abs(factor) * engine.reducer.norm(engine.reducer.norm_squared, options)
            if (scale := self._coefficient(self.grad_norm)) is not None:
                with engine.reducer.update_under_way():
                    self._update(scale * factor)
        finally:
            engine.calls.end("step")

    def _count(self) -> None:
        self.engine.live.clear()
        self.step_count += 1
        if self.engine.commits is not None:
            self.engine.commits.stepped()

    def _coefficient(self, norm: float) -> float | None:
        """The factor of all gradients; as torch: max_norm / (norm + 1e-6), at most 1. None: skip this step."""
        scale = self.engine.loss_scale
        if not math.isfinite(norm):
            self.engine.discard_gradients()
            if scale is not None and scale.dynamic:
                scale.overflowed()
                return None
            raise GradientError(
                f"the gradient norm is {norm} at step {self.step_count + 1}; nothing was updated and the gradients are "
                "discarded. Look for the loss that is not finite. With parameters in fp16, give zero_core.shard "
                'loss_scale="dynamic", and call optimizer.scale_loss(loss).backward()'
            )
        inverse = 1.0
        if scale is not None:
            inverse = 1.0 / scale.value
            norm *= inverse
            self.grad_norm = norm
            scale.succeeded()
        if self.max_grad_norm is None:
            return inverse
        return inverse * min(1.0, self.max_grad_norm / (norm + 1e-6))

    def _update(self, scale: float) -> None:
        engine = self.engine
        steps: list[Sequence[int]] = []
        stepped: set[int | None] = set()
        for unit in engine.units:
            for k in unit.stepped():
                unit.overwritten(k)
                stepped.add(unit.groups[k])
            steps.append(unit.count_step(Leftover.STEPPED))
        engine.gradients.factors.forget()
        groups = frozen(self.param_groups)
        written = self.double.step(groups, stepped) if self._by_itself else {}
        random = torch.get_rng_state() if self._together and engine.ranks.size > 1 else None
        engine.store.update(groups, scale, engine.orders.next_use(), steps)
        if random is not None and not torch.equal(random, torch.get_rng_state()):
            raise UnsupportedOptimizerError(
                f"optimizer {self._kind} has drawn random numbers in step(). Each rank draws different numbers, so its "
                "parameters differ now: use one rank, options with which step() draws none, or another optimizer"
            )
        for number, values in written.items():
            self.param_groups[number].update(copy.deepcopy(values))
        self._count()

    @_not_traced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients.

        With set_to_none=False torch would have zeros, and step them with momentum and weight decay; step() then raises
        GradientError where a parameter that had a gradient gets none.
        """
        if in_backward():
            raise ZeroError("zero_grad() inside backward: call it between steps")
        self.engine.discard_gradients(Leftover.NOTHING if set_to_none else Leftover.ZEROED)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if getattr(self, "_sealed", False):
            raise UnsupportedOptimizerError(
                "add_param_group after zero_core.shard: the shards are cut already. Add the group to your optimizer "
                "before zero_core.shard. To train p only later, freeze p after shard(): p.requires_grad_(False)"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Groups and step counts, while that is all there is. Not collective.

        Raises UnsupportedOptimizerError once a parameter has stepped, where there are optimizer states, or fp32 masters
        of 16-bit parameters: those are sharded, and the error names the calls that save them.
        """
        self.engine.refuse_over("state_dict()")
        if not any(any(unit.steps) for unit in self.engine.units):
            return self._packed({})
        store = self.engine.store
        kept = [name for name in (*store.state_names(), *store.scalar_names()) if name != "master"]
        if any(unit.trainable and unit.dtype != torch.float32 for unit in self.engine.units):
            kept.append("fp32 masters")
        if kept:
            raise UnsupportedOptimizerError(
                f"state_dict() of a sharded optimizer would lack {', '.join(kept)}, because each rank has only a part "
                f"of each. {INSTEAD}"
            )
        return self._full(keep=True)

    def full_state_dict(self, *, rank0_only: bool = True) -> dict[str, Any]:
        """All states as one plain dict, in host memory. Collective: every rank calls it.

        It has the format of state_dict() of the unsharded model's torch optimizer, with states in fp32: that optimizer
        loads it, and so does `load_state_dict` at any world size, stage and store. It also has "step_count",
        "loss_scale", and for parameters in 16 bits "masters", number -> fp32 master, which torch ignores. States are
        gathered one at a time. rank0_only: other ranks get an empty dict, as they would need the same memory.

        The host needs 8 bytes an element for Adam, and 4 more for 16-bit parameters; zero_core.checkpoint.save needs no
        such memory. Raises ZeroError inside forward, backward and `gathered`.
        """
        refuse_busy(self.engine, "full_state_dict()")
        self.engine.settle()
        self.engine.ranks.patience.assemble("optimizer.full_state_dict()")
        return self._full(keep=not rank0_only or self.engine.ranks.rank == 0)

    def check_saved(self) -> None:
        """Raise UnsupportedOptimizerError where this rank has a state that a first step does not make."""
        if (late := self.engine.store.late_state()) is not None:
            raise UnsupportedOptimizerError(
                f"optimizer {self._kind} created the state {late[1]!r} of {late[0]} after the first step. Only states "
                f"that the first step creates can be saved and loaded: create {late[1]!r} in the first step. To save "
                "the weights that were trained so far, call zero_core.checkpoint.save(folder, model)"
            )

    def _full(self, *, keep: bool) -> dict[str, Any]:
        self.check_saved()
        states, masters = gather_states(self.param_groups, self._options.formats, self.engine, keep=keep)
        return self._packed(states, masters) if keep else {}

    def _packed(self, states: dict[Tensor, dict[str, Any]], masters: dict[int, Tensor] | None = None) -> dict[str, Any]:
        nothing, vars(self)["state"] = self.state, states
        try:
            packed = super().state_dict()
        finally:
            vars(self)["state"] = nothing
        scale = self.engine.loss_scale
        return {
            **packed,
            **({"masters": masters} if masters else {}),
            "step_count": self.step_count,
            "loss_scale": scale.state_dict() if scale is not None else None,
        }

    def load_state_dict(self, state_dict: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Load a dict of `full_state_dict`, of `state_dict`, or of a torch optimizer. Collective; rank 0's is taken.

        Of several optimizers that were given to `shard` it may be a list of their state dicts, in their order.

        Other ranks may give an empty dict. A parameter without states in it starts over, as with torch. Load weights in
        16 bits before it: the masters of a `full_state_dict` then get all their bits back.

        Raises before anything is changed: UnsupportedOptimizerError for states that are absent, or that this optimizer
        does not keep, ValueError for other groups, and ZeroError for masters of other weights.
        """
        refuse_busy(self.engine, "load_state_dict()")
        state_dict = dict(joined_states(state_dict))
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        self.engine.settle()
        found = put_back(self.param_groups, self._options.formats, self.engine, state_dict)
        if self.engine.loss_scale is not None and found.get("loss_scale") is not None:
            self.engine.loss_scale.load_state_dict(found["loss_scale"])
        self.step_count = int(found.get("step_count", max(max(u.steps, default=0) for u in self.engine.units)))
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def state_names_of(self, group: int, shape: tuple[int, ...]) -> tuple[str, ...]:
        """Names of the states of a value an element of a parameter of `shape` in this group, besides its master."""
        names = tuple(name for name in self.engine.store.state_names() if name != "master")
        if (named := self._options.formats[group].named(shape)) is not None:
            return tuple(name for name in names if name in named)
        if not self._joint:  # the store's state names may differ from torch's
            return names
        return tuple(name for name in names if name in self._options.formats[group].stepped)

    def names_states(self, group: int, shape: tuple[int, ...]) -> bool:
        """Whether the states of such a parameter depend on its shape, as of one that is needed whole."""
        return self._options.formats[group].named(shape) is not None

    def close(self) -> None:
        """Finish updates and a checkpoint under way, and give the store's memory back. The model cannot be used after.

        Raises the error of a failed background checkpoint, when all is closed. Where the model is in other shards, or
        plain, nothing happens.
        """
        if self.engine.over is not None:
            return
        try:
            if not (self.engine.calls.interrupted or self.engine.reducer.updating):
                self.engine.settle()
                if self.engine.commits is not None:
                    self.engine.commits.begin_step()
                    self.engine.commits.end_copy()
        finally:
            self.engine.attachment.detach()
            self.engine.store.close()
            self.engine.pool.clear()

    def __getstate__(self) -> dict[str, Any]:
        raise UnsupportedOptimizerError(
            f"a ShardedOptimizer cannot be copied or pickled, because each rank has a part of the states. {INSTEAD}"
        )

    def __repr__(self) -> str:
        return f"ShardedOptimizer over {len(self.engine.units)} units, {super().__repr__()}"
