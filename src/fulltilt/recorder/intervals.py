"""From marks to tiles: every nanosecond of the training thread's life in one place. Pure, no torch.

Without a GPU a tile is host time: each stretch between two marks goes to the activity it was spent in. On a GPU a tile
is GPU time, cut at the events (see gpu_time). A tile ends with a step: the first hundred hold one step each, later
ones as many as pass in a twentieth of a second or in 1/2000 of the run, so that their number grows with its logarithm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fulltilt.recorder.gpu_clock import GpuTime
from fulltilt.recorder.marks import (
    PHASE,
    PHASE_OF_SHELF,
    SHELF,
    Activity,
    BackwardBegan,
    BackwardEnded,
    BatchArrived,
    BookedApart,
    EpochBegan,
    EvalMode,
    Finished,
    Mark,
    OptimizerStepped,
    PassBegan,
    PassEnded,
    Rested,
    Shelves,
    WaitBegan,
)
from fulltilt.recorder.step_sampling import LONG_STEP_NS, LONG_WAIT_NS
from fulltilt.recorder.steps import BehindSteps, StepCounter


@dataclass(frozen=True, slots=True)
class Tile:
    """A stretch of the job's time with ``steps`` steps in it. ``shelves`` add up to ``t1_ns - t0_ns``."""

    t0_ns: float
    t1_ns: float
    steps: int
    skipped: int
    batches: int
    samples: int | None
    epoch: int
    shelves: Shelves
    step_max_ns: float
    data_wait_max_ns: float
    sync_blocked_ns: float
    gpu: bool
    # What of it was not spent as in most steps: at rest it would be booked by itself.
    unusual: Shelves = field(default_factory=Shelves)

    @property
    def queueing_ns(self) -> float:
        """Host time a step that may queue work for a GPU."""
        busy = sum(self.shelves.phases.get(phase, 0.0) for phase in ("user", "backward", "optimizer"))
        return busy / max(self.steps, 1)


@dataclass(slots=True)
class OpenTile:
    """The tile under way, with what its shelves held when its last step ended."""

    t0_ns: float
    shelves: Shelves = field(default_factory=Shelves)
    unusual: Shelves = field(default_factory=Shelves)
    at_step_end: Shelves = field(default_factory=Shelves)
    steps: int = 0
    skipped: int = 0
    batches: int = 0
    samples: int | None = None
    step_max_ns: float = 0.0
    wait_max_ns: float = 0.0
    blocked_ns: float = 0.0

    def count(self, batches: int, samples: int | None) -> None:
        """So many batches and samples went into its steps; None where nobody knows how many samples."""
        self.batches += batches
        if samples is not None:
            self.samples = (self.samples or 0) + samples

    def set_apart(self, shelf: str, ns: float) -> None:
        """This much of a shelf was not spent as in most steps."""
        self.unusual.put(shelf, ns)
        if shelf in PHASE_OF_SHELF:
            self.unusual.phase(PHASE_OF_SHELF[shelf], ns)

    def set_step_apart(self) -> None:
        """The step that just ended took long: it did something that most steps do not. Its long waits are apart."""
        for shelf, ns in self.shelves.time.items():
            if shelf != SHELF[Activity.NEXT]:
                self.set_apart(shelf, max(0.0, ns - self.at_step_end.time.get(shelf, 0.0)))
        for after, ns in self.since_step().user_after.items():
            self.unusual.user(after, ns)

    def since_step(self) -> Shelves:
        """What has been booked since the last step ended."""
        return self.shelves.beyond(self.at_step_end)

    def close(self, t1_ns: float, epoch: int, gpu: bool) -> Tile:
        """The finished tile."""
        return Tile(
            t0_ns=self.t0_ns,
            t1_ns=t1_ns,
            steps=self.steps,
            skipped=self.skipped,
            batches=self.batches,
            samples=self.samples,
            epoch=epoch,
            shelves=self.shelves,
            step_max_ns=self.step_max_ns,
            data_wait_max_ns=self.wait_max_ns,
            sync_blocked_ns=self.blocked_ns,
            gpu=gpu,
            unusual=self.unusual,
        )


ONE_BY_ONE = 100
SHORTEST_NS = 50e6
RESOLUTION = 2000

NEXT, OPTIMIZER, SAVE, SYNC = Activity.NEXT, Activity.OPTIMIZER, Activity.SAVE, Activity.SYNC
USER = Activity.USER


class TileBuilder:
    """Feeds on marks in order, with the GPU's time of each event already resolved; finished tiles are in ``closed``."""

    def __init__(self, t0_ns: int) -> None:
        self.counter = StepCounter()
        self.closed: list[Tile] = []
        self.epoch = 0
        self.validating = False
        self.gpu: GpuTime | None = None
        self.behind_steps = BehindSteps()
        self._t0_ns = t0_ns
        self._now: float = t0_ns
        self._activity = self._after = Activity.USER
        self._since: float = t0_ns
        self._started = False
        self._preparing = True
        self._eval_mode = False
        self._in_backward = False
        self._wait = 0.0
        self._hand_steps = 0
        self._before_pass: dict[int, dict[str, float]] = {}
        self._undeclared: dict[str, float] = {}
        self.steps = 0
        self.calls = 0
        self._tiles = 0
        self._step_end: float = t0_ns
        self._tile = OpenTile(t0_ns)
        self._meaning: dict[type, Callable[[Any], None]] = {
            BatchArrived: self._batch,
            BackwardBegan: self._backward_began,
            BackwardEnded: self._backward_ended,
            OptimizerStepped: self._stepped,
            PassBegan: self._pass_began,
            PassEnded: self._pass_ended,
            WaitBegan: lambda fact: self._evaluate(fact.evaluating),
            EpochBegan: self._epoch_began,
            EvalMode: self._eval_mode_set,
            Rested: self._rested,
            BookedApart: self._booked_apart,
            Finished: self._finish,
        }

    # ------------------------------------------------------------------ marks in

    def feed(self, mark: Mark | tuple[Any, ...], gpu_ns: float | None = None) -> None:
        """Take one mark. ``gpu_ns`` is when the GPU reached its event, on the host's clock."""
        t_ns, activity, fact, point, _ = mark
        if t_ns > self._now:
            self._spend(t_ns)
        if gpu_ns is not None:
            if self.gpu is None:
                # The first event: the queue was drained for it, so that host and GPU stand at the same moment.
                self.gpu = GpuTime(self._now, point)
            else:
                self.gpu.advance(float(t_ns), gpu_ns, point, self._tile.shelves)
        if fact is not None:
            self._meaning[type(fact)](fact)
        if activity is not None and activity is not self._activity:
            if self._after is OPTIMIZER and self._activity is USER and not self.validating:
                self.behind_steps.ended(self._now - self._since, activity)
            self._after, self._activity, self._since = self._activity, activity, self._now

    def _spend(self, t_ns: int) -> None:
        """Book the host time since the last mark on the shelf it was spent on."""
        began, self._now = self._now, float(t_ns)
        spent, activity = self._now - began, self._activity
        shelf = self._shelf()
        if not self._preparing and not self.validating:
            if activity is NEXT:
                self._wait += spent
            elif activity is SYNC:
                self._tile.blocked_ns += spent
            elif activity is USER:
                self._tile.shelves.user(self._after, spent)
            phases, phase = self._tile.shelves.phases, PHASE.get(activity, "other")
            phases[phase] = phases.get(phase, 0.0) + spent
        if self.gpu is None:
            time = self._tile.shelves.time
            time[shelf] = time.get(shelf, 0.0) + spent
        else:
            self.gpu.held.append((began, self._now, shelf))

    def _shelf(self) -> str:
        if self._preparing:
            return "startup"
        return "validation" if self.validating and self._activity is not SAVE else SHELF[self._activity]

    # ------------------------------------------------------------------ what facts mean

    def _batch(self, fact: BatchArrived) -> None:
        if self._undeclared:
            self._settle_undeclared()
        self._evaluate(fact.evaluating)
        self.counter.batch(fact.loader_id, fact.samples, fact.evaluating, fact.doubtful)
        if not self._started:
            # Whatever came before the batch of the first backward was preparation.
            self._tile.shelves.time = {"startup": sum(self._tile.shelves.time.values())}
            self._tile.shelves.phases.clear()
            self._tile.shelves.user_after.clear()
            self._preparing = False
        elif fact.evaluating:
            self._relabel_wait("validation")
        elif fact.first and fact.workers:
            self._relabel_wait("turnover")
        else:
            self._tile.wait_max_ns = max(self._tile.wait_max_ns, self._wait)
            if self._wait > LONG_WAIT_NS:
                self._tile.set_apart("data_wait", self._wait)
        self._wait = 0.0

    def _relabel_wait(self, shelf: str) -> None:
        """The wait that just ended was not the usual one."""
        if self.gpu is None:
            self._tile.shelves.move("data_wait", shelf, self._wait)
        elif self.gpu.held and self.gpu.held[-1][2] == "data_wait":
            began, ended, _ = self.gpu.held[-1]
            self.gpu.held[-1] = (began, ended, shelf)

    def _pass_began(self, fact: PassBegan) -> None:
        self._before_pass[fact.loader_id] = dict(self._tile.shelves.time)
        if not fact.evaluating:
            self.counter.pass_began(fact.loader_id)
        self._evaluate(fact.evaluating)

    def _pass_ended(self, fact: PassEnded) -> None:
        before = self._before_pass.pop(fact.loader_id, {})
        trained = self.counter.pass_ended(fact.loader_id, fact.evaluating)
        if fact.evaluating:
            self._relabel_wait("validation")
            self._evaluate(self._eval_mode)
        elif trained:
            self.epoch += 1
            if fact.workers:
                self._relabel_wait("turnover")
        elif self.gpu is None and self._started:
            # A whole pass with gradients on and no backward in it: an evaluation that nobody declared, unless
            # backward comes next (then it was drawn ahead, to be accumulated).
            self._undeclared = {shelf: ns - before.get(shelf, 0.0) for shelf, ns in self._tile.shelves.time.items()}
        self._wait = 0.0

    def _settle_undeclared(self) -> None:
        for shelf, ns in self._undeclared.items():
            if shelf != "checkpoint":
                self._tile.shelves.move(shelf, "validation", ns)
        self._undeclared = {}

    def _evaluate(self, on: bool) -> None:
        self.validating = on and self._started

    def _eval_mode_set(self, fact: EvalMode) -> None:
        self._eval_mode = fact.on
        self._evaluate(fact.on)

    def _epoch_began(self, fact: EpochBegan) -> None:
        self.epoch = fact.number

    def _backward_began(self, _: BackwardBegan) -> None:
        self._started = True
        self._preparing = self.validating = self._eval_mode = False
        self._in_backward = True
        if self._undeclared:
            self._undeclared = {}
            self.epoch += 1

    def _backward_ended(self, _: BackwardEnded) -> None:
        if self._in_backward:
            self._in_backward = False
            self.counter.backward()
        if not self.counter.optimizer_seen:
            self._hand_steps += 1
            if self.counter.updates_by_hand():
                steps, self._hand_steps = self._hand_steps, 0
                self._end_step(steps)

    def _stepped(self, fact: OptimizerStepped) -> None:
        self._hand_steps = 0
        self.calls += 1
        if self._in_backward:  # a hook steps as soon as its parameter's gradient is there
            self._in_backward = False
            self.counter.backward()
        new = self.counter.begins_new_step(fact.optimizer_id)
        self.counter.optimizer_stepped(fact.optimizer_id)
        if new:
            self._tile.skipped += fact.skipped
            if self.gpu is None and self._now - self._step_end > LONG_STEP_NS:
                self._tile.set_step_apart()
            self._end_step(1)

    def _booked_apart(self, fact: BookedApart) -> None:
        self._tile.set_apart(fact.shelf, fact.ns)
        if fact.shelf == SHELF[USER]:
            self._tile.unusual.user(Activity.REST, fact.ns)
        self._tile.wait_max_ns = max(self._tile.wait_max_ns, self._wait)
        self._wait = 0.0

    def _rested(self, fact: Rested) -> None:
        steps = fact.calls * self.steps // self.calls if self.calls else 0
        batches, samples = self.counter.drawn_at_rest(fact.drawn)
        self._tile.count(batches, samples or None)
        self.calls += fact.calls
        if steps:
            self._end_step(steps)

    # ------------------------------------------------------------------ tiles out

    def _position(self) -> float:
        """Where the job's time stands: the GPU's, once there is one."""
        return self._now if self.gpu is None else self.gpu.position_ns

    def _end_step(self, steps: int) -> None:
        position = self._position()
        self._tile.steps += steps
        self.steps += steps
        self._tile.step_max_ns = max(self._tile.step_max_ns, (position - self._step_end) / steps)
        self._step_end = position
        self._tile.count(*self.counter.take_counts())
        long_enough = max(SHORTEST_NS, (position - self._t0_ns) / RESOLUTION)
        if self._tiles < ONE_BY_ONE or position - self._tile.t0_ns >= long_enough:
            self._close(position)
        self._tile.at_step_end = self._tile.shelves.copy()

    def _close(self, position: float) -> None:
        self.closed.append(self._tile.close(position, self.epoch, self.gpu is not None))
        self._tiles += 1
        self._tile = OpenTile(position)

    def under_way(self, now_ns: float) -> Tile | None:
        """What has passed since the last step, up to now: all that will be known of it if the job is killed.

        None before the first step, and at rest, where nobody knows what is waited for.
        """
        if not self.steps or self._activity is Activity.REST or now_ns <= self._step_end:
            return None
        shelves = self._tile.since_step()
        for began, ended, shelf in self.gpu.held if self.gpu is not None else ():
            shelves.put(shelf, ended - began)
        shelves.put(self._shelf(), now_ns - self._now)
        if self._shelf() == SHELF[USER]:
            shelves.user(self._after, now_ns - self._now)
        gpu = self.gpu is not None
        return Tile(self._step_end, now_ns, 0, 0, 0, None, self.epoch, shelves, 0.0, 0.0, 0.0, gpu)

    def _finish(self, _: Finished) -> None:
        self.counter.settle()
        self._settle_undeclared()
        if self._hand_steps:
            self._end_step(self._hand_steps)
        if self.gpu is not None:
            self.gpu.drain(self._now, self._tile.shelves)
        if self._tile.steps and self._position() > self._step_end:
            self._close_behind_last_step()
        if self._position() > self._tile.t0_ns or self._tile.steps:
            self._close(self._position())

    def _close_behind_last_step(self) -> None:
        """What follows the last step is no part of the training: it gets a tile of its own."""
        later = self._tile.since_step()
        self._tile.shelves = self._tile.at_step_end
        self._close(self._step_end)
        self._tile.shelves = later
