"""Reads, updates and writes tiles on one background thread, in the order of their next use.

Owns the count of updates that each unit still has to wait for. Not here: the bytes (in tiles/), the arithmetic (in the
step), the thread itself (in monitor.py).

[Note: a step in time]
    training   backward n ... | norm | update() returns | forward 0 | forward 1 | forward 2 | ...
    update       reads of the first tiles  | upd 0 | upd 1 | upd 2 | ...
    reads      [ t0 t1 t2 ............. ]    t3      t4      t5       as far ahead as there are slots
    writes                                          t0      t1  ...    a slot is free when its write is done
forward i waits only until unit i's last tile is done. While a tile is unfinished, this thread begins another one only
if that tile's slots (state, gradient, unit) can all be had without waiting. It waits for slots only when no tile is
unfinished. Then a write, a gradient being stored, or a unit in use has the slot, and these end without its help. So it
cannot deadlock, with three slots or any other number.

[Note: tiles in a row]
A step with cores of its own is given the next tiles while it works on one, if they can be started without waiting:
    the step's threads  | t0      | t1      | t2      | t3
    this thread         s0 s1 s2    c0 s3     c1 s4       s: start a tile; c: complete it (write it back, free slots)
So the step has its next tile at hand even while this thread does its own work, or waits for the interpreter's lock
because another thread is launching kernels. Until a tile is completed, only the step touches its record and parameter.
Tiles that visit a discrete device are started and completed in the same row, at most MOST_VISITS at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from ..core import GroupStep
from ..device_link import Visits
from ..layout.footprint import PlacedUnit
from ..layout.store_plan import MOST_VISITS
from ..layout.tile import Tile, segment_steps
from ..memory.arena import Block
from ..memory.slots import Slot
from ..monitor import Worker
from ..protocols import ENDED, Started, StartingStep, TileView, UpdateSegment
from ..streams import Mark
from ..tiles.gradients import GradientStore
from ..tiles.parameters import ParameterStore
from ..tiles.states import StateStore
from ..tiles.store_context import Shared

MOST_STARTED = 8
Call = Callable[[], None]


@dataclass(frozen=True)
class TileTask:
    """One tile of one update. `last`: the last of its unit. `reads`: the update needs the parameter's old values."""

    tile: Tile
    segments: tuple[UpdateSegment, ...]
    gradient_dtype: torch.dtype  # of the kept gradient
    last: bool
    reads: bool = True


def tasks_of(
    unit: PlacedUnit, gradient_dtype: torch.dtype, steps: Sequence[int], groups: Sequence[GroupStep]
) -> list[TileTask]:
    """The tasks of one unit's update. steps: as in ShardStore."""
    found = [(tile, segment_steps(tile, unit.spec.segments, steps, groups)) for tile in unit.tiles]
    found = [(tile, segments) for tile, segments in found if segments]
    tasks = []
    for tile, segments in found:
        record = unit.records[tile.index]
        has_master = record is not None and any(field.name == "master" for field in record.fields)
        writes_all = tile.numel == sum(segment.stop - segment.start for segment in segments)
        reads = not (has_master and writes_all)
        tasks.append(TileTask(tile, segments, gradient_dtype, tile is found[-1][0], reads))
    return tasks


@dataclass(frozen=True)
class _Loaded:
    """A task whose reads are under way, and then its update.

    state, gradient: None if it does not pass through slots. handle: of its update, once that is started. span: begins
    when it is the first of the started tasks.
    """

    task: TileTask
    state: Slot[Block] | None
    gradient: Slot[Block] | None
    handle: Started = field(default_factory=lambda: ENDED)
    span: ExitStack = field(default_factory=ExitStack)

    def ready(self) -> bool:
        """Whether wait_ready would return at once."""
        gradient, state = self.gradient, self.state
        return (gradient is None or gradient.filled()) and (state is None or state.changeable())

    def wait_ready(self) -> None:
        """Returns when both are read. States are changed too, so also when nothing reads them any more."""
        if self.gradient is not None:
            self.gradient.wait_filled()
        if self.state is not None:
            self.state.wait_changeable()


class Pipeline:
    """Runs jobs one after another. `close` ends it between two tiles; it does so too when the interpreter exits."""

    def __init__(
        self, shared: Shared, host: ParameterStore, gradients: GradientStore, states: StateStore, done: Call
    ) -> None:
        """done: called on the update thread after each unit. A discrete device updates tiles that visit it, see
        `Visits`."""
        self._host, self._gradients, self._states = host, gradients, states
        step, monitor = shared.step, shared.monitor
        self._step, self._monitor, self._in_flight, self._pools = step, monitor, shared.in_flight, shared.pools
        self._there = shared.there
        self._starting = step if isinstance(step, StartingStep) and step.in_a_row else None
        streams, self._unit_done = shared.streams, done
        self._visits = None if streams is None else Visits(streams, shared.in_flight)
        enter, name = None if streams is None else streams.enter_thread, "zero-offload update"
        self._worker = Worker[Call](name, monitor, lambda call: call(), enter=enter, trailing=self._trail)

    # -- the training thread ------------------------------------------------------------------------------------

    def submit(self, tasks: Sequence[TileTask], scale: float, after: Mark | None) -> None:
        """Begins an update: tasks in order. A unit is behind until its last task is done.

        after: is waited for first, because options may be tensors on the device.
        """
        with self._monitor.condition:
            for task in tasks:
                self._monitor.updates[task.tile.unit] += task.last
            self._worker.put(partial(self._run, tasks, scale, after))

    def afterwards(self, call: Call) -> None:
        """Calls it on the update thread when every job until now is done. `wait` waits for it too."""
        self._worker.put(call)

    def read_early(self, units: Sequence[int]) -> None:
        """Lets the states of `units`, which will be updated in this order, be read into slots as these come free."""
        self._worker.put(partial(self._states.read_early, tuple(units)))

    def wait(self) -> None:
        """Returns when every update is done and every write has ended."""
        self._monitor.wait_until(self._worker.idle, "all")
        with self._monitor.condition:  # from here on the caller has the states
            self._states.read_early(())
        for slots in self._pools:
            slots.drain()

    def close(self) -> None:
        """Ends after the current tile, drops jobs that have not begun, and waits for writes in flight. Idempotent.

        Raises OffloadError if the current tile does not end.
        """
        self._worker.close()
        for slots in self._pools:
            try:
                slots.drain()
            except Exception as error:
                self._monitor.fail(error)

    # -- the update thread --------------------------------------------------------------------------------------

    def _trail(self) -> bool:
        """Called between jobs, under the condition: whether writes of the last job or reads for the next are in flight.

        If so, the thread looks again soon, because a slot is free when one ends.
        """
        moving = self._in_flight.poll()
        return self._states.read_on() or moving

    def _run(self, tasks: Sequence[TileTask], scale: float, after: Mark | None) -> None:
        waiting, ahead, started = deque(tasks), deque[_Loaded](), deque[_Loaded]()
        self._states.expect([task.tile for task in tasks])
        if after is not None:
            after.wait()
        most = len(self._states.slots) + len(self._gradients.slots) + 4  # where no slot bounds it: into the next unit
        try:
            while waiting or ahead or started:
                self._monitor.check_stop()
                while waiting and len(ahead) < most:
                    loaded = self._begin(waiting[0], wait=not ahead and not started)
                    if loaded is None:
                        break
                    ahead.append(loaded)
                    waiting.popleft()
                if not waiting:
                    self._states.read_on()
                if started and not self._goes_on(ahead, started):
                    self._complete(started)
                else:
                    self._start(ahead.popleft(), scale, started)
        finally:
            with ExitStack() as ending:  # on failure or stop: wait for all, because their memory may be freed next
                for each in reversed(started):
                    ending.push(each.span)
                    ending.callback(each.handle.wait)

    def _goes_on(self, ahead: Sequence[_Loaded], started: Sequence[_Loaded]) -> bool:
        """Whether one more task can be started without waiting."""
        if not ahead or len(started) == MOST_STARTED:
            return False
        loaded = ahead[0]
        if self._starting is None and started[0].handle.done():
            return False  # an update on this thread would delay the completion of the first
        if self._is_visit(loaded) and sum(map(self._is_visit, started)) == MOST_VISITS:
            return False
        return loaded.ready() and self._host.at_hand(loaded.task.tile)

    def _is_visit(self, loaded: _Loaded) -> bool:
        return self._visits is not None and loaded.task.tile.visits

    def _begin(self, task: TileTask, *, wait: bool) -> _Loaded | None:
        """Takes the tile's slots and begins its reads. None if that needs a wait and `wait` is off; a unit slot taken
        stays held."""
        tile, gradient, state = task.tile, None, None
        if not self._host.begin_update(tile.unit, wait=wait):
            return None
        if tile in self._gradients.stored:
            gradient = self._gradients.begin_read(tile, task.gradient_dtype, wait=wait)
            if gradient is None:
                return None
        if tile in self._states.stored:
            state = self._states.begin_read(tile, wait=wait)
            if state is None:
                if gradient is not None:
                    self._gradients.keep(tile, gradient)
                return None
        if task.reads:
            self._host.fetch(tile)
        return _Loaded(task, state, gradient)

    def _start(self, loaded: _Loaded, scale: float, started: deque[_Loaded]) -> None:
        """Waits for the reads, then starts the update, or runs it. Tiles are completed in order."""
        task, tile = loaded.task, loaded.task.tile
        loaded.wait_ready()
        parameter, dtype = self._host.for_update(tile, read=task.reads), task.gradient_dtype
        slot = loaded.gradient
        gradient = self._gradients.in_memory(tile, dtype) if slot is None else slot.memory.view(dtype, tile.numel)
        view = TileView(self._states.views(tile, loaded.state), parameter, gradient, tile.uncut)
        with ExitStack() as span:
            if not started:
                span.enter_context(self._monitor.span("update", str(tile)))
            handle = self._begun(view, task, scale)
            started.append(replace(loaded, handle=handle, span=span.pop_all()))
        if handle is ENDED and len(started) == 1:
            self._complete(started)

    def _begun(self, view: TileView, task: TileTask, scale: float) -> Started:
        if self._visits is not None and task.tile.visits:
            step = self._step if view.uncut is not None else self._there
            assert step is not None
            return self._visits.start(view, lambda there: step.update(there, task.segments, scale))
        if self._starting is not None:
            return self._starting.start(view, task.segments, scale)
        self._step.update(view, task.segments, scale)
        return ENDED

    def _complete(self, started: deque[_Loaded]) -> None:
        """Waits for the first of the started tasks, and completes it."""
        with started[0].span:
            started[0].handle.wait()
        loaded = started.popleft()
        if started:
            started[0].span.enter_context(self._monitor.span("update", str(started[0].task.tile)))
        self._updated(loaded)

    def _updated(self, loaded: _Loaded) -> None:
        """Begins the writes of state and parameter, and gives back the gradient's slot."""
        task, tile = loaded.task, loaded.task.tile
        if loaded.gradient is not None:
            self._gradients.slots.give(loaded.gradient)
        number = max(segment.step for segment in task.segments)
        self._states.changed(tile, loaded.state, number)
        self._host.changed(tile, number)
        if task.last:
            self._host.end_update(tile.unit)
            with self._monitor.condition:
                self._monitor.updates[tile.unit] -= 1
                self._monitor.condition.notify_all()
            self._unit_done()
