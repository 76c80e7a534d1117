"""Answers every hook of a sharded model: before and after each module, and when a gradient arrives.

Owns the engine that the hooks call, and its repair after Ctrl-C. Not here: the next visit and [Note: the order of
collectives] (in schedule.py), units that have memory (in unit_memory/residency_policy.py), visits of a backward (in
backward_pass.py), the step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..active_calls import Calls, hook_outputs, in_backward, mended, outside_transforms, without_views
from ..errors import CollectiveError, GradientError, ZeroError
from ..gradients.gradient_access import GradientAccess
from ..gradients.loss_scaling import LossScale
from ..gradients.reducer import Reducer
from ..unit_memory.residency_policy import Copies, Uses
from ..unit_memory.stacked_parameter import Stacks
from ..unit_memory.unit import Unit
from ..unit_memory.unit_gradient import Leftover
from ..unit_memory.unit_memory import UnitContext
from .attach_hooks import Attachment, FastPaths, Node
from .backward_pass import Backward
from .saved_tensors import Asking
from .schedule import Commits, Orders, Pass, Visit


class Engine:
    """Answers the hooks of one sharded model."""

    def __init__(
        self,
        model: nn.Module,
        nodes: Sequence[Node],
        context: UnitContext,
        uses: Uses,
        reducer: Reducer,
        *,
        loss_scale: LossScale | None,
        optimized: Container[int],
        stacks: Stacks,
    ) -> None:
        """optimized: ids of the parameters in the optimizer's groups, whether trained or not."""
        self.model, self.units, self.nodes = model, reducer.units, nodes
        self.ranks, self.store, self.pool = context.ranks, context.store, context.pool
        self.loss_scale, self.uses, self.reducer, self.writes = loss_scale, uses, reducer, uses.writes
        self.orders = Orders(len(self.units))
        self._gathered_first = self.units if reducer.everywhere and self.ranks.shard.size > 1 else ()
        self._pass: Pass | None = None
        self.live: deque[Pass] = deque(maxlen=16)  # those with a graph, for recomputations that no output announced
        self._backward: Backward | None = None
        self.calls = Calls(type(model).__name__)
        self._fast_paths = FastPaths(self.units, uses, self.calls, self.mend)
        self.commits = Commits(context.store, several=self.ranks.size > 1) if context.store.durable else None
        self.gradients = GradientAccess(reducer, loss_scale, self.abandon_backward)
        self.gathered = 0  # how many `gathered` blocks are open
        self.averages = False  # whether `averaged_model.AveragedModel` has averages in place of the masters
        self.over: str | None = None  # why the model is no longer sharded this way
        self.leaving: list[Callable[[], None]] = []  # called when the model leaves these shards for others
        self.copies = Copies(self.units, uses, self.calls)
        self.stacks, self.attachment = stacks, Attachment(model, self.units, optimized, stacks)

    def attach(self) -> None:
        """Put the hooks on the modules and on the parameters."""
        asking = None if self.uses.keeping else Asking(self.units, self._visit_of, self._asked)
        self.attachment.attach(self.nodes, self._before, self._after, self.collect, asking)
        self.attachment.handles += self._fast_paths.attach(self.model, self.nodes)

    # -- forward ---------------------------------------------------------------------------------------------------

    @property
    def _stack(self) -> list[Visit]:
        """Visits under way, outermost first."""
        return [] if self._pass is None else self._pass.stack

    @mended
    @outside_transforms
    def _before(self, node: Node, module: nn.Module, args: Any) -> None:
        self.ranks.side.go_on()
        if in_backward():  # see [Note: forward inside backward]
            backward = self._ensure_backward()
            backward.inside.begin(node, outer=backward.task == torch._C._current_graph_task_id())
            return
        if self._stack and self.calls.over("forward"):
            self.mend("forward")
        current = self._pass if self._pass is not None and self._pass.stack else self._begin_pass(node)
        parent = current.stack[-1] if current.stack else None
        visit = Visit(node.index, node.units, parent, torch._C._autograd._get_sequence_nr())
        for u in node.units:
            self.units[u].enter(audit=(node.index, current.grad, module.training))
            if node.foreseen:
                current.forecast.used(u)
        current.stack.append(visit)
        self.uses.prefetch(current.forecast.upcoming())

    @mended
    def _after(self, node: Node, module: nn.Module, args: Any, output: Any) -> Any:
        """Returns other outputs where views of parameters would leave a module, else nothing."""
        if in_backward():
            visit = None if self._backward is None else self._backward.inside.end(node)
            if visit is not None and torch.is_grad_enabled():
                hook_outputs(output, visit.sequence, partial(self._open, None, visit))
            return None
        current = self._pass
        if current is None or not current.stack or current.stack[-1].node != node.index:
            return None  # the call failed before it was on the stack
        if current.thread != threading.get_ident():
            return None  # it was refused, as another thread is inside
        visit = current.stack.pop()
        memories = {self.units[u].flat.untyped_storage()._cdata for u in node.units}
        given, output = output, without_views(output, memories)
        if current.grad or torch.is_grad_enabled():
            hooked = hook_outputs(output, visit.sequence, partial(self._open, current, visit))
            if hooked or visit.asks or any(self.units[u].trainable for u in node.units) or not node.units:
                current.visits.append(visit)
        self.uses.release(node.units, evict=current.grad, turning=current.grad, outermost=not current.stack)
        if current.stack:
            return None if output is given else output
        self.orders.keep(node.index, current)
        self._leave_pass()
        self.uses.let_all_go(turning=current.grad)
        return None if output is given else output

    def _begin_pass(self, node: Node) -> Pass:
        self.mend("forward")
        self.calls.begin("forward")
        self.abandon_backward()
        self.uses.let_all_go()  # units that stayed for a backward that did not come
        self.attachment.check(node.module)
        self.writes.check_given(stepping=False)
        grad = torch.is_grad_enabled()
        if grad and self.commits is not None and not self.averages:
            self.commits.begin_forward()
        if grad:
            self.attachment.check_trained()
            if self.ranks.size > 1:
                self.attachment.check_added(node.module)
        for u, unit in enumerate(self._gathered_first):
            unit.unshard()
            self.uses.prefetch(range(u + 1, len(self.units)))
        self._pass = begun = Pass(grad, self.orders.forecast(node.index, grad))
        if grad:
            self.live.append(begun)
        return begun

    def _abandon_forward(self) -> None:
        self._fast_paths.forget()
        self._leave_pass()
        for unit in self.units:
            unit.seal()
        self.uses.let_all_go()

    def _leave_pass(self) -> None:
        self._pass = None
        self.calls.end("forward")

    @property
    def evaluation(self) -> Pass | None:
        """The forward under way, if no backward can follow it."""
        return None if in_backward() or self._pass is None or self._pass.grad else self._pass

    # -- backward --------------------------------------------------------------------------------------------------

    @mended
    @outside_transforms
    def _open(self, of: Pass | None, visit: Visit, gradient: Tensor | None = None) -> None:
        """A gradient reached an output of the visit, or a node reads a saved tensor of its units. of: its pass, or None
        if it was made inside backward; then the visit of the outer pass that it repeats is opened first."""
        self.ranks.side.go_on()
        self._ensure_backward().reach(of, visit, self.live)

    def _visit_of(self, unit: int | None) -> tuple[Pass | None, Visit | None]:
        """The innermost visit under way, or the one of a unit; one of its own if none has the unit."""
        of = None if torch._C._current_graph_task_id() != -1 else self._pass
        inside = () if of is not None or self._backward is None else self._backward.inside.running
        for visit in reversed(inside if of is None else of.stack):
            if unit is None or unit in visit.units:
                visit.asks = True
                return of, visit
        return None, None if unit is None else Visit(-1, (unit,))

    def _asked(self, of: Pass | None, visit: Visit | None) -> None:
        """Autograd reads a saved tensor of the visit's units."""
        if visit is None or (self._backward is not None and self._backward.has_open(visit)):
            return
        if in_backward() and visit not in self._stack:
            self._open(of, visit)

    def _ensure_backward(self) -> Backward:
        task = torch._C._current_graph_task_id()
        if self._backward is not None and self._backward.task != task:
            self.calls.refuse_others("backward")
            if self._backward.raised:
                self.mend("backward")
                self.abandon_backward()
        if self._backward is None:
            self.mend("backward")
            self.calls.begin("backward")
            if self.commits is not None:
                self.commits.begin_backward()
            end = partial(self._end_backward)
            self._backward = Backward(self.uses, self.reducer, end, partial=bool(self._stack))
            self.gradients.apply_factors()
            torch.autograd.Variable._execution_engine.queue_callback(end)
        return self._backward

    @mended
    def collect(self, unit: Unit, k: int) -> None:
        """A parameter's gradient is complete."""
        self.ranks.side.go_on()
        visits = self._stack
        if in_backward():
            visits = visits + self._ensure_backward().around
        if self.loss_scale is not None and not self.loss_scale.running and unit.groups[k] is not None:
            raise GradientError(
                f"the loss of this backward is not scaled. It reached the parameter {unit.layout.slots[k].name!r} of "
                f"{type(self.model).__name__}, which was sharded with loss_scale=. Call "
                "optimizer.scale_loss(loss).backward(). If this loss must not train the model, call "
                "model.requires_grad_(False) before the forward"
            )
        unit.gradient.given() if any(unit.index in visit.units for visit in visits) else unit.gradient.collect(k)

    @mended
    @outside_transforms
    def _end_backward(self) -> None:
        """Autograd is done with a backward."""
        if self._backward is None:
            return
        self.ranks.side.go_on()
        self._backward.finish()
        self._backward = None
        self.calls.end("backward")
        self.uses.let_all_go()

    def abandon_backward(self) -> None:
        """Call it where a backward may have raised."""
        backward, self._backward = self._backward, None
        if backward is not None:
            self.calls.end("backward")
            backward.abandon()
            self.uses.let_all_go()

    def note_external_use(self, unit: Unit) -> None:
        """Inside a forward, notes that the unit's gradient is not complete when its module's visits are closed. Outside
        of any it may be late."""
        if self._pass is not None and unit.index not in self._pass.external and unit.trainable:
            self._pass.external.append(unit.index)

    # -- around a step -----------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        running = bool(self._stack) and not self.calls.over("forward")
        return running or (self._backward is not None and in_backward())

    def refusal(self) -> str | None:
        """Why the shards cannot be read now, and the way out; None: they can."""
        if self.busy or in_backward():
            return (
                "inside forward or backward: call it after loss.backward() has returned. To change a gradient during "
                "backward, use parameter.register_hook(function), which gets this rank's part of the gradient"
            )
        if self.gathered:
            return "inside zero_core.gathered, where parameters are not in their shards: leave the with block first"
        return None

    def mend(self, what: str) -> None:
        """Ends what Ctrl-C has left before `what` begins. If it came between two hooks, the forward is abandoned: each
        unit is in one of its states. If it came inside of one, no state can be trusted: memory and gradients are reset,
        and the step refuses until zero_grad(), because gradients are lost. Raises ZeroError where another thread is
        inside, and where no reset is right: after half an update, while ranks or copies may still be under way."""
        self.refuse_over(what)
        self.calls.refuse_others(what)
        if self.reducer.updating:
            raise ZeroError(
                f"{what} is not possible: Ctrl-C or an error cut an update of {type(self.model).__name__} short, so "
                "some parameters are not updated. Build the model and its optimizer again, and load the last checkpoint"
            )
        if self._stack and self.calls.over("forward"):
            self._abandon_forward()
        if not self.calls.interrupted:
            return
        if self.ranks.size > 1 or self.store.swaps_in:
            others = "other ranks may wait for this one" if self.ranks.size > 1 else "a copy may be under way"
            raise CollectiveError(
                f"{what} after Ctrl-C inside of a hook of {type(self.model).__name__} on rank {self.ranks.rank} of "
                f"{self.ranks.size}, where {others}: end all processes, and resume from the last checkpoint"
            )
        self._fast_paths.forget()
        self._leave_pass()
        self._backward = None
        self.calls.end("backward")
        self.copies.taken.clear()
        self.uses.forget()
        for unit in self.units:
            unit.begin_anew()
        self.reducer.begin_anew()
        self.pool.begin_anew()
        self.calls.interrupted = False

    def refuse_over(self, what: str) -> None:
        """Raise ZeroError, which begins with `what`, if the model is no longer sharded this way."""
        if self.over is not None:
            raise ZeroError(f"{what} needs shards that {type(self.model).__name__} no longer has, {self.over}")

    @mended
    def settle(self) -> None:
        """Give every lease back: the store may be read, written and updated after this. Gradients that visits left in
        `p.grad` are in shards then."""
        self.mend("this call")
        if self.gathered:
            raise ZeroError(
                "this call inside zero_core.gathered, where parameters are not in shards: leave the with block first"
            )
        self.abandon_backward()
        for unit in self.units:
            self.reducer.take_given(unit, range(len(unit.parameters)))
        self.copies.taken.clear()
        self.uses.settle()

    @mended
    def discard_gradients(self, leftover: Leftover = Leftover.NOTHING) -> None:
        self.mend("zero_grad()")
        self.abandon_backward()  # a reduction of it may still be under way
        self.reducer.discard(leftover)
        self.gradients.factors.forget()

    def drop_gradient(self, unit: Unit, k: int) -> None:
        """`p.grad = None` on one parameter: it is not updated. When that was the last one, all gradients go."""
        self.gradients.factors.forget((unit.index, k))
        if not self.reducer.drop(unit, k):
            self.discard_gradients()
