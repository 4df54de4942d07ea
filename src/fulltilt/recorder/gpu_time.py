"""How a stretch of the GPU's time divides into work and idleness, and what the host did while it was idle. Pure.

A stretch [a, b] between two events holds the work that the host queued between the two marks. The GPU can only have
been idle in it while the host had not yet queued everything, that is between the moment it reached event a and the
moment the host set mark b. How much of that it was really busy is known from stretches of the same kind that the GPU
began late (the queue was full, so they hold no idle time), or that a queued delay made it begin late. Idle time goes to
what the host did meanwhile: first to what queues nothing, then to what queues kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fulltilt.recorder.marks import Point
from fulltilt.recorder.shelves import Shelves

# While the host is on one of these shelves it queues no kernels, so a GPU that has run dry stays idle throughout.
QUEUES_NOTHING = frozenset(
    {"data_wait", "turnover", "checkpoint", "communication", "transfer", "validation", "startup", "observer"}
)
QUEUES_KERNELS = frozenset({"user", "backward", "optimizer"})
# Stretches between these points hold no kernels of the user's, as long as nothing better is known.
NO_WORK = {
    (Point.STEP, Point.BATCH),
    (Point.STEP, Point.EVAL),
    (Point.EVAL, Point.BATCH),
    (Point.BATCH, Point.COPY),
    (Point.COPY, Point.COPY),
}
# Between these points the GPU does nothing but copy.
COPIES = {(Point.BATCH, Point.COPY), (Point.COPY, Point.COPY)}
# A running mean over about this many stretches follows a job whose work changes.
REMEMBERED = 32
# A calibrated stretch may have been idle for so much of its time and still teach how long the work in it takes.
DOUBT = 0.15

Held = tuple[float, float, str]  # a stretch of host time: begin, end, shelf


@dataclass
class WorkBook:
    """How long the GPU is busy in a stretch of each kind, from stretches that it began late."""

    busy_ns: dict[tuple[Point, Point], float] = field(default_factory=dict)
    seen: dict[tuple[Point, Point], int] = field(default_factory=dict)

    def learn(self, kind: tuple[Point, Point], ns: float) -> None:
        """Remember a stretch that is known to hold no idle time."""
        self.seen[kind] = self.seen.get(kind, 0) + 1
        old = self.busy_ns.get(kind, ns)
        self.busy_ns[kind] = old + (ns - old) / min(self.seen[kind], REMEMBERED)

    def expected(self, kind: tuple[Point, Point]) -> float | None:
        """Busy nanoseconds of a stretch of this kind; None when none was ever seen without idle time."""
        if kind in self.busy_ns:
            return self.busy_ns[kind]
        return 0.0 if kind in NO_WORK else None

    @property
    def knows_a_step(self) -> bool:
        """Whether both halves of a step were seen without idle time."""
        return {Point.BACKWARD, Point.STEP} <= {end for _, end in self.busy_ns}


class GpuTime:
    """The GPU's time as it advances from event to event."""

    def __init__(self, start_ns: float, point: Point) -> None:
        self.position_ns = start_ns
        self.lag_ns = 0.0
        self.work = WorkBook()
        self.held: list[Held] = []
        self._point = point
        # Parts of a stretch that calibrating delays cut off, and how long the GPU may have been idle in them.
        self._partial_ns = self._doubtful_ns = 0.0

    def advance(self, host_ns: float, gpu_ns: float, point: Point, shelves: Shelves) -> None:
        """The host set a mark at ``host_ns``, the GPU reached its event at ``gpu_ns``: book the stretch it ends."""
        begin, end = self.position_ns, max(gpu_ns, self.position_ns)
        self.position_ns = end
        self.lag_ns = end - host_ns
        span = end - begin
        held, self.held = self.held, []
        dry_until = min(host_ns, end)
        starved = max(0.0, dry_until - begin)
        if point is Point.DELAY:
            shelves.put("observer", span)
            return
        if point is Point.SYNCED:
            shelves.put("busy", span)
            self._partial_ns += span
            self._doubtful_ns += starved
            return
        kind, self._point = (self._point, point), point
        partial, doubtful = self._partial_ns, self._doubtful_ns + starved
        self._partial_ns = self._doubtful_ns = 0.0
        if any(shelf == "validation" for *_, shelf in held):
            idle = _book_behind_validation(begin, dry_until, held, shelves)
            shelves.put("validation", span - idle)
            return
        if any(shelf == "rest" for *_, shelf in held):
            waited = min(span, sum(ended - began for began, ended, shelf in held if shelf == "data_wait"))
            shelves.put("data_wait", waited)
            shelves.put("rest", span - waited)
            return
        if not doubtful or (partial and doubtful <= DOUBT * (partial + span)):
            self.work.learn(kind, partial + span - doubtful / 2)
        expected = self.work.expected(kind)
        idle = 0.0 if expected is None else min(max(0.0, span - expected), starved)
        shelves.put("transfer" if kind in COPIES else "busy", span - idle)
        if idle:
            _book_idle(idle, begin, dry_until, held, shelves)

    def drain(self, host_ns: float, shelves: Shelves) -> None:
        """The job is over and the queue empty: what the host did since the last event is what remained."""
        for began, ended, shelf in self.held:
            shelves.put(shelf, max(0.0, ended - max(began, self.position_ns)))
        self.held.clear()
        self.position_ns = max(host_ns, self.position_ns)


def _book_behind_validation(begin: float, end: float, held: list[Held], shelves: Shelves) -> float:
    """Book what the host did behind a validation, when the GPU had done that one's work. Returns how long it was."""
    first = next(place for place, (*_, shelf) in enumerate(held) if shelf == "validation")
    later = [(began, ended, shelf) for began, ended, shelf in held[first:] if shelf != "validation"]
    idle = sum(max(0.0, min(ended, end) - max(began, begin)) for began, ended, _ in later)
    if idle:
        _book_idle(idle, begin, end, later, shelves)
    return idle


def _book_idle(idle: float, begin: float, end: float, held: list[Held], shelves: Shelves) -> None:
    quiet: dict[str, float] = {}
    loud: dict[str, float] = {}
    for began, ended, shelf in held:
        overlap = min(ended, end) - max(began, begin)
        if overlap <= 0:
            continue
        if shelf in QUEUES_NOTHING:
            quiet[shelf] = quiet.get(shelf, 0.0) + overlap
        elif shelf in QUEUES_KERNELS:
            # Not so while the host is blocked in a synchronising call: then the GPU is at work.
            loud[shelf] = loud.get(shelf, 0.0) + overlap
    total = sum(quiet.values())
    booked = min(idle, total)
    for shelf, overlap in quiet.items():
        shelves.put(shelf, booked * overlap / total)
    shelves.put("starved", idle - booked)
    shelves.phase("starved_user", loud.get("user", 0.0))
