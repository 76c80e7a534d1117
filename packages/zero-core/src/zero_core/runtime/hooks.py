"""The run of a step: what happens before and after a unit's module, in forward and in backward.

Owns the engine that the hooks call. What a unit does is `unit`'s, which comes next is `schedule`'s, where a complete
gradient goes is `reducer`'s, when the optimizer runs `optimizer`'s; [Note: the order of collectives] is in schedule.py.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..errors import CollectiveError, GradientError, ZeroError
from .attaching import Attachment, Node, fast_paths
from .calls import Calls
from .context import UnitContext
from .exchange import Exchange
from .factors import Factors
from .gradient import Leftover
from .gradient_access import apply_factors
from .outputs import hook_outputs, in_backward, not_traced, outside_transforms, tensors_of
from .recompute import Recomputations
from .reducer import Reducer
from .residency import Residency
from .residents import Residents
from .rounds import Rounds
from .scaling import LossScale, scale_gradients
from .schedule import Forecast, Pass, Visit
from .stages import StageRow
from .unit import Unit
from .writes import Writes

__all__ = ["Engine", "mended"]

_Method = TypeVar("_Method", bound=Callable[..., Any])


def mended(method: _Method) -> _Method:
    """The method of an engine, or of what has one: what Ctrl-C leaves half done in it is mended, see `Engine.mend`."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **options: Any) -> Any:
        grad = torch.is_grad_enabled()
        try:
            return method(self, *args, **options)
        except BaseException as error:
            torch._C._set_grad_enabled(grad)  # Ctrl-C at the end of a no_grad block leaves it off
            if not isinstance(error, Exception):
                getattr(self, "engine", self).interrupted = True
            raise

    return run  # type: ignore[return-value]


@dataclasses.dataclass
class _Backward:
    """The backward under way: the pass it is in, and those it has been through.

    task: autograd's number of it. node: the sequence number of its node that last ran a module. inner: what backwards
    inside of it have open, by their numbers, see [Note: forward inside backward].
    """

    task: int
    current: Pass | None = None
    passes: list[Pass] = dataclasses.field(default_factory=list)
    node: int = 0
    inner: dict[int, list[Visit]] = dataclasses.field(default_factory=dict)


class Engine:
    """Answers the hooks of one sharded model."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        context: UnitContext,
        stage: StageRow,
        *,
        prefetch_bytes: int,
        resident_bytes: int,
        loss_scale: LossScale | None,
        max_grad_norm: float | None,
        begin_update: Callable[[Unit], Callable[[], None]] | None,
        optimized: Container[int],
    ) -> None:
        """optimized: ids of the parameters in the optimizer's groups, whether trained or not."""
        self.model, self.units, self.stage = model, units, stage
        self.ranks, self.store, self.pool = context.ranks, context.store, context.pool
        self.prefetch_bytes, self.loss_scale, self.max_grad_norm = prefetch_bytes, loss_scale, max_grad_norm
        self.residents = Residents(resident_bytes)
        self.reducer = Reducer(units, context, keeps=stage.keeps_gradients, begin_update=begin_update)
        self.nodes: list[Node] = []
        self.forecasts: dict[tuple[int, bool], Forecast] = {}
        self._forecast = Forecast()
        self._stack: list[Visit] = []
        self._pass: Pass | None = None
        self._holding: list[nn.Module] = []  # that look at units inside of them, in eval mode
        self._live: list[Pass] = []  # passes with a graph, for recomputations that no output hook announced
        self._backward: _Backward | None = None
        self._recomputed = Recomputations()
        self.writes = Writes(context.ranks)
        self.factors = Factors()
        self.exchange = Exchange(units, context, self.reducer, self.writes)
        self.gathered = 0  # how many `gathered` blocks are open
        self.uneven = False  # inside `zero_core.uneven`
        self.plans: dict[int, list[int]] = {}  # `rounds` learns them
        self._rounds: Rounds | None = None  # between ranks whose forwards may differ
        self._whole: set[int] = set()  # units that were unsharded when that began
        self._keeping = stage.keeps_parameters  # memory stays between uses
        self.copies: dict[tuple[int, int], tuple[int, Tensor]] = {}  # see `snapshot`
        self.calls = Calls(type(model).__name__)
        self.interrupted = False  # by Ctrl-C inside of a hook, anywhere
        self._attachment = Attachment(model, units, optimized)

    def attach(self, nodes: Sequence[Node]) -> None:
        """Put the hooks on the modules and on the parameters."""
        self.nodes = list(nodes)
        self._attachment.attach(self.nodes, self._before, self._after, self.collect)
        for module, units in fast_paths(self.model, self.nodes):
            hold, release = partial(self._hold_inside, units), partial(self._release_inside, units)
            before, after = not_traced(hold), not_traced(release)
            held = module.register_forward_pre_hook(before, with_kwargs=True)
            handles = held, module.register_forward_hook(after, always_call=True)
            self.keep_attached(handles)

    def keep_attached(self, handles: Iterable[Any]) -> None:
        """Hooks that others have put on the model go with these."""
        self._attachment.handles += handles

    def detach(self) -> None:
        self._attachment.detach()

    # -- forward ---------------------------------------------------------------------------------------------------

    @mended
    @outside_transforms
    def _before(self, node: Node, module: nn.Module, args: Any) -> None:
        self.ranks.side.go_on()
        if in_backward():
            self._begin_recomputation(node)
            return
        if self._stack and self.calls.over("forward"):
            self.mend("forward")
        if not self._stack:
            self._begin_pass(node)
        assert self._pass is not None
        parent = self._stack[-1] if self._stack else None
        visit = Visit(node.index, node.units, parent, torch._C._autograd._get_sequence_nr())
        for u in node.units:
            self._bring(self.units[u])
            self.units[u].enter(audit=(node.index, self._pass.grad, module.training))
            self._forecast.used(u)
            self._pass.started.append(u)
        self._stack.append(visit)
        self._prefetch(self._forecast.upcoming())

    @mended
    def _after(self, node: Node, module: nn.Module, args: Any, output: Any) -> Any:
        """Returns other outputs for the outermost module where the loss is scaled, else nothing."""
        if in_backward():
            self._end_recomputation(node, output)
            return None
        if not self._stack or self._stack[-1].node != node.index:
            return None  # the call failed before it was on the stack
        if self._pass is not None and self._pass.thread != threading.get_ident():
            return None  # it was refused, as another thread is inside
        visit = self._stack.pop()
        current = self._pass
        assert current is not None
        if current.grad or torch.is_grad_enabled():
            hooked = hook_outputs(output, visit.sequence, partial(self._before_backward, current, visit))
            if hooked or visit.followed or any(self.units[u].trainable for u in node.units) or not node.units:
                current.complete(visit)
        for u in node.units:
            self._leave(self.units[u])
            self._let_go(self.units[u])
        if self._stack:
            return None
        self._end_pass()
        return scale_gradients(output, self.loss_scale) if self.loss_scale is not None and current.grad else None

    def _begin_pass(self, node: Node) -> None:
        self.mend("forward")
        self.calls.begin("forward")
        if self._backward is not None:
            self.abandon_backward()
        if node.module is self.model:
            self._attachment.check()
        self.writes.check_given(stepping=False)
        grad = torch.is_grad_enabled()
        if grad:
            self._attachment.check_trained()
            if self.ranks.size > 1:
                self._attachment.check_added(node.module)
        self._refuse_gradients()
        if self._rounds is not None:
            self._rounds.begin(self, node.index)
            self._forecast = Forecast()  # ranks would remember different passes
        else:
            self._forecast = self.forecasts.setdefault((node.index, grad), Forecast())
        self._forecast.begin()
        self._pass = Pass(grad)
        if grad:
            self._live = [*self._live[-15:], self._pass]

    def _end_pass(self) -> None:
        assert self._pass is not None
        if self._rounds is not None:
            self._rounds.finish()
        self._forecast.learn(self._pass.started)
        self._pass = None
        self.calls.end("forward")
        self._let_all_go()

    def _abandon_forward(self) -> None:
        if self._rounds is not None:
            self._rounds.finish()
        self._holding.clear()
        self._stack.clear()
        self._pass = None
        self.calls.end("forward")
        for unit in self.units:
            unit.seal()
        self._let_all_go()

    def hold(self, units: Iterable[int]) -> None:
        """Units of a visit under way stay gathered after it, until `release`: another visit follows it at once."""
        for u in units:
            self.units[u].enter()

    def release(self, units: Iterable[int]) -> None:
        for u in units:
            if self.units[u].users:  # else the forward failed, and nothing is held any more
                self._leave(self.units[u])
            self._let_go(self.units[u])

    @outside_transforms
    def _hold_inside(self, units: Sequence[int], module: nn.Module, args: Any, kwargs: Any) -> None:
        """In eval mode the module looks at the parameters of these units itself, see `fast_paths`. Where there will be
        a graph it takes no fast path, and what it uses has to be noted as used from outside."""
        if module.training or (self._rounds is not None and not self._stack):
            return
        used = (*tensors_of((args, kwargs)), *(p for u in units for p in self.units[u].parameters))
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in used):
            return
        self._holding.append(module)
        for u in units:
            self._bring(self.units[u])
            self.units[u].enter()

    def _release_inside(self, units: Sequence[int], module: nn.Module, args: Any, output: Any) -> None:
        if self._holding and self._holding[-1] is module:
            self._holding.pop()
            self.release(units)

    def follow(self, tensor: Tensor) -> None:
        """A tensor that the visit under way was given is used after the forward, though no module returns it: its
        gradient opens what encloses the visit."""
        if len(self._stack) > 1 and tensor.requires_grad:
            assert self._pass is not None
            self._stack[-2].followed = True
            tensor.register_hook(partial(self._before_backward, self._pass, self._stack[-2]))

    @outside_transforms
    def _let_go(self, unit: Unit) -> None:
        """Nothing uses the unit now: stage 3 takes its memory away."""
        if unit.users == 0 and not self._keeping and unit.residency is not Residency.SHARDED:
            cyclic = self._pass is not None and not self._pass.grad
            for evicted in self.residents.admit(unit, evict=not cyclic):
                if evicted.users == 0:
                    evicted.reshard()

    def _let_all_go(self) -> None:
        """What was gathered ahead and not used goes; what the budget keeps stays."""
        if self._keeping:
            return
        for unit in self.units:
            if unit.residency is not Residency.SHARDED and unit.users == 0 and unit not in self.residents:
                unit.reshard()

    def _prefetch(self, upcoming: Iterable[int]) -> None:
        """Start the units that come next, as many as the bytes allow, one at least; the store hears of one more.

        To gather ahead is to wait for that unit's own update first: when it is done differs between ranks, and ranks
        that decided by it would cross. What the store has to read for the gather after it may begin meanwhile.
        """
        budget = self.prefetch_bytes
        for u in upcoming:
            unit = self.units[u]
            if unit.residency.whole:
                continue
            if budget <= 0 or (budget < unit.nbytes and budget < self.prefetch_bytes):
                if self.prefetch_bytes > 0:
                    self.store.prefetch(u)
                return
            budget -= unit.nbytes
            unit.prefetch()

    # -- backward --------------------------------------------------------------------------------------------------

    @mended
    @outside_transforms
    def _before_backward(self, current: Pass, visit: Visit, gradient: Tensor) -> Tensor | None:
        """A gradient reached an output of the visit: open it, and what was skipped on the way, in order."""
        self.ranks.side.go_on()
        if self._ensure_backward().task == torch._C._current_graph_task_id():
            self._open(current, visit)
        else:
            self._open_inside(visit)
        return None

    def _ensure_backward(self) -> _Backward:
        if self.uneven:
            raise ZeroError("backward() inside zero_core.uneven, where ranks may differ: leave the with block first")
        task = torch._C._current_graph_task_id()
        if self._backward is not None and self._backward.task != task and self.calls.over("backward"):
            self.mend("backward")
            self.abandon_backward()
        if self._backward is None:
            self.mend("backward")
            self.calls.begin("backward")
            self._backward = _Backward(task)
            apply_factors(self)
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        return self._backward

    def _open(self, current: Pass, visit: Visit) -> None:
        backward = self._ensure_backward()
        if torch.is_grad_enabled():
            self._keeping = True  # create_graph=True: the graph being made holds parameters; they stay until the step
        if current is not backward.current:
            if backward.current is not None:
                self._drain(backward.current)
            if current not in backward.passes:
                current.begin_backward()
                backward.passes.append(current)
            backward.current = current
        if visit.index >= current.position:
            if visit not in current.open:  # closed already, and wanted again
                current.remaining.update(visit.units)
                self._open_one(current, visit)
            return
        for each in current.path_to(visit):
            self._open_one(current, each)

    def _open_inside(self, visit: Visit) -> None:
        """A gradient reached an output of the visit in a backward inside of the one under way."""
        inner, task = self._ensure_backward().inner, torch._C._current_graph_task_id()
        if torch.is_grad_enabled():
            self._keeping = True  # as in `_open`
        if task not in inner:
            inner[task] = []
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end_inside, task))
        if visit in inner[task]:
            return
        self._enter_inside(visit.units)
        self._stop_lingering()
        self._end_inside(task, visit)
        inner[task].append(visit)

    @mended
    def _enter_inside(self, units: Sequence[int]) -> None:
        """Units are used inside backward: with the values that the forward had, or not at all."""
        for unit in (self.units[u] for u in units if self.reducer.updates):
            if unit.gradient.stored or Leftover.UPDATED in unit.gradient.leftover:
                raise GradientError(
                    f"unit {unit.name!r} is used inside a backward that has updated it, or is about to, so the use "
                    "would find other values than the forward did. Leave update_in_backward out"
                )
        for u in units:
            self.units[u].enter()

    def _end_inside(self, task: int, wanted: Visit | None = None) -> None:
        """Close what an inner backward has open, but for what encloses the visit that it wants now, or is inside of it:
        the two may have returned the same tensor."""
        backward = self._backward
        if backward is None or task not in backward.inner:
            return
        open_ones = backward.inner[task]
        kept = [v for v in open_ones if wanted is not None and (v.encloses(wanted) or wanted.encloses(v))]
        closing, backward.inner[task] = [v for v in reversed(open_ones) if v not in kept], kept
        for u in (u for visit in closing for u in visit.units):
            self._leave(self.units[u])
            self._let_go(self.units[u])

    def _open_one(self, current: Pass, visit: Visit) -> None:
        for u in visit.units:
            self.units[u].enter()
        self._stop_lingering()
        for earlier in current.leave_for(visit):
            self._close(current, earlier)
        current.open.append(visit)
        self._prefetch(u for k in range(visit.index - 1, -1, -1) for u in current.visits[k].units)

    def _close(self, current: Pass, visit: Visit) -> None:
        for u in visit.units:
            self._leave(self.units[u])
        for u in current.closed(visit):
            if u not in current.external and not self._stack:  # inside a forward nothing is complete
                self.reducer.retire(self.units[u])
        for u in visit.units:
            self._let_go(self.units[u])

    def _drain(self, current: Pass) -> None:
        for visit in current.path_to(None):
            self._open_one(current, visit)
        for visit in current.leave_for(None):
            self._close(current, visit)

    @mended
    def collect(self, unit: Unit, k: int) -> None:
        """A parameter's gradient is complete."""
        self.ranks.side.go_on()
        if in_backward():
            self._ensure_backward()
        unit.gradient.collect(k)

    @mended
    @outside_transforms
    def _end_backward(self) -> None:
        """Autograd is done: close what is open, visit what was skipped, reduce what came late."""
        backward = self._backward
        if backward is None:
            return
        self.ranks.side.go_on()
        if backward.current is not None:
            self._drain(backward.current)
        for u in dict.fromkeys(reversed([u for each in backward.passes for u in each.external])):
            self.reducer.retire(self.units[u])
        for unit in reversed(self.units):
            self.reducer.retire_late(unit)
        self.reducer.finish()
        self._stop_lingering(everything=True)
        for task in backward.inner:  # of an inner backward that raised, and was caught
            self._end_inside(task)
        self._backward = None
        self.calls.end("backward")
        self._let_all_go()

    def abandon_backward(self) -> None:
        """A backward raised: forget what it left half done. What it already reduced stays, as torch keeps p.grad."""
        self._backward = None
        self.calls.end("backward")
        self._recomputed.stop(everything=True)
        self.reducer.finish()
        for unit in self.units:
            unit.gradient.drop_current()
            if unit.users and unit.residency.whole:
                unit.users = 1
                self._leave(unit)  # torch keeps what a recomputation wrote before the error
            unit.seal()
        self._let_all_go()

    # -- recomputation, see [Note: forward inside backward] ----------------------------------------------------------

    def _begin_recomputation(self, node: Node) -> None:
        backward = self._ensure_backward()
        running = torch._C._current_autograd_node()
        if backward.task == torch._C._current_graph_task_id() and running is not None:
            backward.node = running._sequence_nr()
        self._enter_inside(node.units)
        self._stop_lingering()
        self._recomputed.begin(node.index, node.units, torch._C._autograd._get_sequence_nr())

    def _end_recomputation(self, node: Node, output: Any) -> None:
        visit = self._recomputed.end(node.index)
        if visit is not None and torch.is_grad_enabled():
            hook_outputs(output, visit.sequence, partial(self._before_recomputed, visit))

    def _stop_lingering(self, everything: bool = False) -> None:
        for u in self._recomputed.stop(everything):
            if self.units[u].users:
                self._leave(self.units[u])
            self._let_go(self.units[u])

    @mended
    @outside_transforms
    def _before_recomputed(self, visit: Visit, gradient: Tensor) -> None:
        """A gradient reached an output that was computed inside backward: open its visit, and first the one of the
        outer pass for which it stands."""
        self.ranks.side.go_on()
        backward = self._ensure_backward()
        self._end_inside(torch._C._current_graph_task_id(), visit)
        for candidate in reversed(self._live) if backward.current is None else [backward.current]:
            if backward.current is None:
                candidate.begin_backward()
            repeated = candidate.pending(visit.node, backward.node)
            if repeated is not None:
                self._open(candidate, repeated)
                break
        self._open_inside(visit)

    # -- a parameter used outside its unit: see place.py ---------------------------------------------------------------

    def note_external_use(self, unit: Unit) -> Callable[[Tensor], Tensor]:
        """Inside a forward the unit's gradient will not be complete when its module's visits are closed.

        Outside of any, it may be complete or not, and is late then.
        """
        if self._pass is not None:
            if unit.index not in self._pass.external and unit.trainable:
                self._pass.external.append(unit.index)
        elif self.loss_scale is not None:  # this gradient will not pass the root's outputs
            scale = self.loss_scale
            return lambda gradient: gradient * scale.value
        return lambda gradient: gradient

    @outside_transforms
    def full_copy(self, unit: Unit, k: int) -> Tensor:
        """Parameter k of the unit, whole. Collective. Never an inference tensor, whose writes nothing counts."""
        epoch, known = self.copies.get((unit.index, k), (-1, None))
        if known is not None and epoch == unit.epochs[k]:
            return known
        (values,) = self._full_copies(unit, [k])
        return values

    @mended
    def _full_copies(self, unit: Unit, indices: Sequence[int]) -> list[Tensor]:
        self.calls.refuse_others(f"a use of {unit.layout.slots[indices[0]].name}")
        with torch.no_grad():
            self._bring(unit)
            unit.unshard()
            values = [unit.views[k].clone() for k in indices]
        self._let_go(unit)
        return values

    @outside_transforms
    def snapshot(self, wanted: Mapping[int, Sequence[int]], call: str) -> None:
        """`full_copy` has these parameters of these units from here on, until `copies` is cleared. Collective."""
        self.copies.clear()
        gathers = [u for u in wanted if not self.units[u].residency.whole]
        if gathers and self.ranks.shard.size > 1 and not (self.busy or self.uneven):
            self.ranks.assemble(call)
        for u in sorted(wanted):
            unit = self.units[u]
            for k, values in zip(wanted[u], self._full_copies(unit, wanted[u]), strict=True):
                self.copies[u, k] = unit.epochs[k], values

    @outside_transforms
    def _leave(self, unit: Unit) -> None:
        """One visit fewer of the unit. What was written into its parameters is kept, or refused at the step."""
        written = unit.users == 1 and unit.was_written()
        if unit.users == 1 and not written:
            self.writes.unseen(unit.name, unit.unseen_write())
        unit.leave()
        if written:
            with torch.no_grad():
                self.writes.note(unit.name, unit.flat)
                unit.keep_written()
                if self._keeping and unit.residency is Residency.SHARDED:
                    unit.unshard(copy=True)

    @outside_transforms
    def write(self, unit: Unit, k: int, values: Tensor) -> None:
        """Keep new whole values of parameter k: this rank's part goes to the store."""
        unit.reshard()
        unit.epochs[k] += 1
        flat = values.detach().reshape(-1)
        self.writes.note(unit.layout.slots[k].name, flat)
        unit.write_part("master", k, flat)

    # -- inside `zero_core.uneven`, see [Note: ranks that differ] -----------------------------------------------------

    def _bring(self, unit: Unit) -> None:
        """The unit is used next: ranks that may differ agree to gather it."""
        if self._rounds is not None:
            self._rounds.bring(unit)
        elif Rounds.entered is not None and not self.uneven and self.ranks.shard.size > 1:
            raise ZeroError(
                f"unit {unit.name!r} of {type(self.model).__name__} is used inside zero_core.uneven, which does not "
                "name this model, so ranks that are done would not gather it: name all, zero_core.uneven(a, b)"
            )

    def _refuse_gradients(self) -> None:
        if self.uneven and torch.is_grad_enabled():
            raise ZeroError(
                f"a forward of {type(self.model).__name__} with gradients inside zero_core.uneven, where ranks may "
                "differ and no backward can follow: run it under torch.no_grad() or inference_mode(), or outside of "
                "the with block"
            )

    @outside_transforms
    def enter_uneven(self, rounds: Rounds) -> None:
        """Ranks begin with the same units unsharded: those that stay until the step."""
        self.uneven = True
        if self in rounds.members:
            self.residents.clear()
            for unit in self.units:
                if unit.users == 0 and not (self._keeping and unit.residency.whole):
                    unit.reshard()  # also what was gathered ahead and is still under way
            self._rounds, self._whole = rounds, {unit.index for unit in self.units if unit.residency.whole}

    @outside_transforms
    def leave_uneven(self) -> None:
        """Ranks go on with the same units unsharded, whatever each of them gathered."""
        rounds, self.uneven, self._rounds = self._rounds, False, None
        if rounds is None:
            return
        if self._stack:
            self._abandon_forward()
        self.residents.clear()
        for unit in self.units:
            if unit.users == 0 and unit.index not in self._whole:
                with suppress(CollectiveError):  # the block is left because of it
                    unit.reshard()

    # -- around a step -----------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        running = bool(self._stack) and not self.calls.over("forward")
        return running or (self._backward is not None and in_backward())

    def mend(self, what: str) -> None:
        """Call it before `what` begins. After Ctrl-C nothing is in flight any more, as after `zero_grad()`.

        Where it came between two hooks, each unit is in one of its states, and the forward is abandoned. Where it came
        inside of one, no state can be trusted. Memory and gradients then begin anew, and the step refuses until
        zero_grad(), because gradients are lost. Raises ZeroError where another thread is inside, and where that would
        not be right: after half an update, while ranks or copies may still be under way.
        """
        self.calls.refuse_others(what)
        if self.reducer.updating:
            raise ZeroError(
                f"{what} after an update of {type(self.model).__name__} that did not end, because of Ctrl-C or an "
                "error: some parameters are updated and some are not. Build the model and its optimizer anew, and load "
                "the last checkpoint"
            )
        if self._stack and self.calls.over("forward"):
            self._abandon_forward()
        if not self.interrupted:
            return
        if self.ranks.size > 1 or getattr(self.store, "swaps_in", False):
            others = "other ranks may wait for this one" if self.ranks.size > 1 else "a copy may be under way"
            raise CollectiveError(
                f"{what} after Ctrl-C inside of a hook of {type(self.model).__name__} on rank {self.ranks.rank} of "
                f"{self.ranks.size}, where {others}: end all processes, and resume from the last checkpoint"
            )
        self._stack.clear()
        self._pass = self._backward = None
        self.calls.end("forward")
        self.calls.end("backward")
        self._recomputed.stop(everything=True)
        self.residents.clear()
        self.copies.clear()
        self._keeping = self.stage.keeps_parameters
        for unit in self.units:
            unit.begin_anew()
        self.reducer.begin_anew()
        self.pool.begin_anew()
        self.interrupted = False

    @mended
    def settle(self) -> None:
        """Give every lease back: the store may be read, written and updated after this."""
        self.mend("a step, a checkpoint or another use")
        if self.gathered:
            raise ZeroError(
                "a step, a checkpoint or close() inside zero_core.gathered, which holds parameters outside of their "
                "shards and writes them back at its end: leave the with block first"
            )
        if self.uneven:
            raise ZeroError(
                "a step, a checkpoint or close() inside zero_core.uneven, where ranks may differ: leave the with block "
                "first"
            )
        if self._backward is not None:
            self.abandon_backward()
        self.residents.clear()
        self.copies.clear()
        self._keeping = self.stage.keeps_parameters
        for unit in self.units:
            unit.seal()
            unit.reshard()

    @mended
    def discard_gradients(self, leftover: Leftover = Leftover.NOTHING) -> None:
        self.mend("zero_grad()")
        if self._backward is not None:
            self.abandon_backward()  # a reduction of it may still be under way
        self.reducer.discard(leftover)
        self.factors.forget()

    def complete_all_gradients(self) -> None:
        """Reduce what is kept of all gradients before the step does, but for late ones. Collective."""
        if self._backward is not None:
            self.abandon_backward()
        self.reducer.reduce_kept()

    def complete_gradients(self, wanted: Sequence[tuple[Unit, int]]) -> list[bool]:
        """Whether any rank has a gradient of each parameter for the next step. The stores then have all of it.
        Collective.

        Other ranks' flags decide too, so that all of them reduce, or none.
        """
        if self._backward is not None:
            self.abandon_backward()
        mine = [float(flag) for unit, k in wanted for flag in (unit.gradient.used[k], unit.gradient.late)]
        what = f"the full gradient of {', '.join(unit.layout.slots[k].name for unit, k in wanted[:3])}"
        flags = [flag > 0 for flag in self.ranks.sum_everywhere(self.ranks.numbers(mine), what).tolist()]
        used, late = flags[::2], flags[1::2]
        for unit in dict.fromkeys(unit for (unit, _), there in zip(wanted, used, strict=True) if there):
            self.reducer.complete(
                unit, late=any(flag for (of, _), flag in zip(wanted, late, strict=True) if of is unit)
            )
        return used

    def drop_gradient(self, unit: Unit, k: int) -> None:
        """`p.grad = None` on one parameter: it is not updated. When that was the last one, all gradients go."""
        self.factors.forget((unit.index, k))
        if not self.reducer.drop(unit, k):
            self.discard_gradients()

    def next_use(self) -> list[int]:
        """Every unit, in the order in which the next forward will want it."""
        known = max((f.order for f in self.forecasts.values()), key=len, default=())
        return [*known, *(u.index for u in self.units if u.index not in set(known))]

    def forget_passes(self) -> None:
        self._live.clear()
