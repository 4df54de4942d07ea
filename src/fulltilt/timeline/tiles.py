"""From marks to tiles: every nanosecond of the training thread's life in one place. Pure, no torch.

Without a GPU a tile is host time: each stretch between two marks goes to the activity it was spent in.

On a GPU a tile is GPU time, cut at the events. A stretch [a, b] of it holds the work that the host queued between the
two marks. The GPU can only have been idle in it while the host had not yet queued everything, that is between the
moment it reached event a and the moment the host set mark b. How much of that it was really busy is known from
stretches of the same kind that the GPU began late (the queue was full, so they hold no idle time), or that a queued
delay made it begin late. Idle time goes to what the host did meanwhile: first to what queues nothing, then to what
queues kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fulltilt.timeline.marks import (
    Activity,
    BackwardBegan,
    BackwardEnded,
    BatchArrived,
    EvalMode,
    Finished,
    Mark,
    OptimizerStepped,
    PassBegan,
    PassEnded,
    Point,
    WaitBegan,
)
from fulltilt.timeline.steps import StepCounter

# Where time of an activity goes. USER time is split later by what the stack samples saw in it.
SHELF = {
    Activity.USER: "user",
    Activity.NEXT: "data_wait",
    Activity.ITER: "turnover",
    Activity.BACKWARD: "backward",
    Activity.OPTIMIZER: "optimizer",
    Activity.SAVE: "checkpoint",
    Activity.SYNC: "sync",
    Activity.COPY: "transfer",
    Activity.COMM: "communication",
    Activity.OBSERVE: "observer",
}
# While the host is on one of these shelves it queues no kernels, so a GPU that has run dry stays idle throughout.
QUEUES_NOTHING = frozenset(
    {"data_wait", "turnover", "checkpoint", "communication", "transfer", "validation", "startup", "observer"}
)
# Stretches between these points hold no kernels of the user's, as long as nothing better is known.
NO_WORK = {
    (Point.STEP, Point.BATCH),
    (Point.STEP, Point.EVAL),
    (Point.EVAL, Point.BATCH),
    (Point.BATCH, Point.COPY_BEGIN),
}


@dataclass
class Shelves:
    """Nanoseconds by shelf, with the host's own phases beside them."""

    time: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)

    def put(self, shelf: str, ns: float) -> None:
        """Book time on a shelf."""
        if ns:
            self.time[shelf] = self.time.get(shelf, 0.0) + ns

    def phase(self, name: str, ns: float) -> None:
        """Book host time of a phase of the step."""
        if ns:
            self.phases[name] = self.phases.get(name, 0.0) + ns

    def add(self, other: Shelves) -> None:
        """Put everything of another set of shelves on these."""
        for shelf, ns in other.time.items():
            self.put(shelf, ns)
        for name, ns in other.phases.items():
            self.phase(name, ns)

    def move(self, source: str, target: str, ns: float) -> None:
        """Move up to ``ns`` from one shelf to another."""
        moved = min(ns, self.time.get(source, 0.0))
        if moved > 0:
            self.time[source] -= moved
            self.put(target, moved)


@dataclass(frozen=True)
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
    data_wait_max_ns: float
    sync_blocked_ns: float
    gpu: bool


@dataclass
class WorkBook:
    """How long the GPU is busy in a stretch of each kind, from stretches that it began late."""

    busy_ns: dict[tuple[Point, Point], float] = field(default_factory=dict)
    seen: dict[tuple[Point, Point], int] = field(default_factory=dict)

    def learn(self, kind: tuple[Point, Point], ns: float) -> None:
        """Remember a stretch that is known to hold no idle time."""
        count = min(self.seen.get(kind, 0) + 1, 32)
        self.seen[kind] = self.seen.get(kind, 0) + 1
        old = self.busy_ns.get(kind, ns)
        self.busy_ns[kind] = old + (ns - old) / count

    def expected(self, kind: tuple[Point, Point]) -> float | None:
        """Busy nanoseconds of a stretch of this kind; None when none was ever seen without idle time."""
        if kind in self.busy_ns:
            return self.busy_ns[kind]
        return 0.0 if kind in NO_WORK else None


class TileBuilder:
    """Feeds on marks in order, with the GPU's time of each event already resolved, and yields finished tiles."""

    def __init__(self, t0_ns: int) -> None:
        self.counter = StepCounter()
        self.work = WorkBook()
        self.epoch = 0
        self.validating = False
        self.lag_ns = 0.0
        self._now: float = t0_ns
        self._activity = Activity.USER
        self._shelf_override: str | None = "startup"
        self._tile = Shelves()
        self._tail = Shelves()
        self._tile_t0: float = t0_ns
        self._tile_end: float | None = None
        self._tile_steps = 0
        self._tile_batches = 0
        self._tile_samples: int | None = None
        self._skipped = 0
        self._held: list[tuple[float, float, str]] = []
        self._gpu: tuple[float, float, Point] | None = None
        self._blocked = [0.0, 0.0]
        self._wait_max = 0.0
        self._tile_wait_max = 0.0
        self._wait = 0.0
        self._passes: dict[int, tuple[int, dict[str, float]]] = {}
        self._started = False
        self._eval_mode = False
        self._partial_ns: float | None = 0.0
        self._hand_steps = 0

    # ------------------------------------------------------------------ marks in, tiles out

    def feed(self, mark: Mark, gpu_ns: float | None = None) -> Iterator[Tile]:
        """Take one mark. ``gpu_ns`` is when the GPU reached its event, on the host's clock."""
        self._advance(mark)
        fact = mark.fact
        if mark.point and gpu_ns is not None:
            self._cut(mark, gpu_ns)
        if isinstance(fact, BatchArrived):
            self._batch(fact)
        elif isinstance(fact, BackwardEnded):
            yield from self._backward_ended()
        elif isinstance(fact, OptimizerStepped):
            yield from self._stepped(fact)
        elif isinstance(fact, PassBegan):
            self._passes[fact.loader_id] = (self.counter.backwards, dict(self._tail.time))
            self._evaluate(fact.evaluating)
        elif isinstance(fact, WaitBegan):
            self._evaluate(fact.evaluating)
        elif isinstance(fact, PassEnded):
            self._pass_ended(fact)
        elif isinstance(fact, EvalMode):
            self._eval_mode = fact.on
            self._evaluate(fact.on)
        elif isinstance(fact, Finished):
            yield from self._finish()
        self._begin(mark)

    def _advance(self, mark: Mark) -> None:
        """Book the host time since the last mark on the shelf it was spent on."""
        t = max(float(mark.t_ns), self._now)
        spent, began = t - self._now, self._now
        self._now = t
        if not spent:
            return
        activity = self._activity
        if activity is Activity.SYNC and not self.validating:
            self._blocked[1] += spent
        if activity is Activity.NEXT and not self.validating:
            self._wait += spent
        self._phase(activity, spent)
        shelf = self._shelf_override or ("validation" if self.validating else SHELF[activity])
        if activity is Activity.SAVE:
            shelf = "checkpoint"
        if self._gpu is None:
            self._tail.put(shelf, spent)
        else:
            self._held.append((began, t, shelf))

    def _begin(self, mark: Mark) -> None:
        if mark.activity is not None:
            self._activity = mark.activity
        if isinstance(mark.fact, BackwardBegan):
            self._started = True
            self._shelf_override = None
            self.validating = self._eval_mode = False

    def _phase(self, activity: Activity, spent: float) -> None:
        if self.validating or self._shelf_override == "startup":
            return
        name = {
            Activity.NEXT: "load",
            Activity.COPY: "transfer",
            Activity.BACKWARD: "backward",
            Activity.OPTIMIZER: "optimizer",
            Activity.USER: "user",
        }.get(activity, "other")
        self._tail.phase(name, spent)

    # ------------------------------------------------------------------ what facts mean

    def _batch(self, fact: BatchArrived) -> None:
        self._evaluate(fact.evaluating)
        self.counter.batch(fact.loader_id, fact.samples, fact.evaluating)
        if fact.evaluating:
            self._relabel("data_wait", "validation")
        elif fact.first and fact.workers and self._started:
            self._relabel("data_wait", "turnover")
        elif self._started:
            self._wait_max = max(self._wait_max, self._wait)
        elif not self._started:
            # Whatever came before the batch of the first backward was preparation.
            self._tail.time = {"startup": sum(self._tail.time.values())}
            self._tail.phases.clear()
            self._shelf_override = None
        self._wait = 0.0

    def _relabel(self, source: str, target: str) -> None:
        """The wait that just ended belongs to another shelf."""
        if self._held and self._held[-1][2] == source:
            began, ended, _ = self._held[-1]
            self._held[-1] = (began, ended, target)
        elif self._gpu is None:
            self._tail.move(source, target, self._wait)

    def _pass_ended(self, fact: PassEnded) -> None:
        backwards, before = self._passes.pop(fact.loader_id, (self.counter.backwards, {}))
        trained = self.counter.backwards - backwards
        if fact.evaluating:
            self._relabel("data_wait", "validation")
        elif fact.workers and trained:
            self._relabel("data_wait", "turnover")
        self.counter.pass_ended(fact.loader_id, trained)
        if trained:
            self.epoch += 1
        elif not fact.evaluating and self._gpu is None and self._started:
            # A whole pass with gradients on and no backward in it: an evaluation that nobody declared.
            for shelf, ns in list(self._tail.time.items()):
                if shelf != "checkpoint":
                    self._tail.move(shelf, "validation", ns - before.get(shelf, 0.0))
        if fact.evaluating:
            self._evaluate(self._eval_mode)
        self._wait = 0.0

    def _evaluate(self, on: bool) -> None:
        if self._started:
            self.validating = on

    def _backward_ended(self) -> Iterator[Tile]:
        self.counter.backward()
        if not self.counter.optimizer_seen:
            self._hand_steps += 1
        if self.counter.updates_by_hand():
            yield from self._close()
            self._open(steps=self._hand_steps, skipped=0)
            self._hand_steps = 0

    def _stepped(self, fact: OptimizerStepped) -> Iterator[Tile]:
        self._hand_steps = 0
        new = self.counter.begins_new_step(fact.optimizer_id)
        self.counter.optimizer_stepped(fact.optimizer_id)
        if new:
            yield from self._close()
        self._open(steps=1 if new else 0, skipped=1 if fact.skipped and new else 0)

    # ------------------------------------------------------------------ tiles

    def _position(self) -> float:
        """Where the job's time stands: the GPU's, once there is one."""
        return self._now if self._gpu is None else self._gpu[0]

    def _open(self, steps: int, skipped: int) -> None:
        """Everything since the last step end belongs to the tile whose step just ended."""
        self._tile.add(self._tail)
        self._tail = Shelves()
        self._tile_end = self._position()
        self._tile_steps += steps
        self._skipped += skipped
        batches, samples = self.counter.take_counts()
        self._tile_batches += batches
        if samples is not None:
            self._tile_samples = (self._tile_samples or 0) + samples
        self._blocked[0] += self._blocked[1]
        self._blocked[1] = 0.0
        self._tile_wait_max = max(self._tile_wait_max, self._wait_max)
        self._wait_max = 0.0

    def _close(self) -> Iterator[Tile]:
        if self._tile_end is None:
            return
        yield Tile(
            t0_ns=self._tile_t0,
            t1_ns=self._tile_end,
            steps=self._tile_steps,
            skipped=self._skipped,
            batches=self._tile_batches,
            samples=self._tile_samples,
            epoch=self.epoch,
            shelves=self._tile,
            data_wait_max_ns=self._tile_wait_max,
            sync_blocked_ns=self._blocked[0],
            gpu=self._gpu is not None,
        )
        self._tile_t0 = self._tile_end
        self._tile = Shelves()
        self._tile_end = None
        self._tile_steps = self._skipped = self._tile_batches = 0
        self._tile_samples = None
        self._tile_wait_max = 0.0
        self._blocked[0] = 0.0

    def _finish(self) -> Iterator[Tile]:
        if self._hand_steps:
            self._open(steps=self._hand_steps, skipped=0)
        yield from self._close()
        if self._gpu is not None:
            # The queue has drained by now: what the host did since is what remained of the job's time.
            position = self._gpu[0]
            for began, ended, shelf in self._held:
                self._tail.put(shelf, max(0.0, ended - max(began, position)))
            self._held.clear()
            self._gpu = (max(self._now, position), self._now, Point.NONE)
        if self._position() > self._tile_t0:
            self._open(steps=0, skipped=0)
            yield from self._close()

    # ------------------------------------------------------------------ the GPU's time

    def _cut(self, mark: Mark, gpu_ns: float) -> None:
        """End a stretch of GPU time at this mark's event and book it."""
        host_ns = float(mark.t_ns)
        if self._gpu is None:
            # The first event: the queue was drained for it, so that host and GPU stand at the same moment.
            self._gpu = (self._now, host_ns, mark.point)
            return
        gpu_a, _, point_a = self._gpu
        gpu_b = max(gpu_ns, gpu_a)
        self.lag_ns = gpu_b - host_ns
        span = gpu_b - gpu_a
        held, self._held = self._held, []
        starved = max(0.0, min(host_ns, gpu_b) - gpu_a)
        if mark.point in (Point.DELAY, Point.SYNCED):
            # Inside a calibrating step: the stretch goes on after the delay, which is no work of the user's.
            self._gpu = (gpu_b, host_ns, point_a)
            if mark.point is Point.DELAY:
                self._tail.put("observer", span)
            else:
                self._tail.put("busy", span)
                self._partial_ns = None if starved or self._partial_ns is None else self._partial_ns + span
            return
        self._gpu = (gpu_b, host_ns, mark.point)
        partial, self._partial_ns = self._partial_ns, 0.0
        kind = (point_a, mark.point)
        if kind == (Point.COPY_BEGIN, Point.COPY_END):
            self._tail.put("transfer", span)
            return
        if any(shelf == "validation" for *_, shelf in held):
            self._tail.put("validation", span)
            return
        if not starved and partial is not None:
            self.work.learn(kind, partial + span)
        expected = self.work.expected(kind)
        idle = 0.0 if expected is None else min(max(0.0, span - expected), starved)
        self._tail.put("busy", span - idle)
        self._book_idle(idle, gpu_a, min(host_ns, gpu_b), held)

    def _book_idle(self, idle: float, begin: float, end: float, held: list[tuple[float, float, str]]) -> None:
        overlaps: dict[str, float] = {}
        for began, ended, shelf in held:
            overlap = min(ended, end) - max(began, begin)
            if overlap > 0:
                overlaps[shelf] = overlaps.get(shelf, 0.0) + overlap
        left = idle
        quiet = {shelf: ns for shelf, ns in overlaps.items() if shelf in QUEUES_NOTHING}
        # While the host is blocked in a synchronising call the GPU is at work: no idle time belongs there.
        loud = {shelf: ns for shelf, ns in overlaps.items() if shelf in ("user", "backward", "optimizer")}
        self._tail.phase("starved_user", overlaps.get("user", 0.0))
        for part in (quiet, loud):
            total = sum(part.values())
            if not total or left <= 0:
                continue
            booked = min(left, total)
            for shelf, ns in part.items():
                self._tail.put(shelf if part is quiet else "starved", booked * ns / total)
            left -= booked
        self._tail.put("starved", left)
