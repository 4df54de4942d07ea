"""How a stretch of the GPU's time divides into work and idle time, and what the host did while it was idle. Pure.

A stretch [a, b] between two events holds the work that the host queued between the two marks. The GPU can only have
been idle in it before everything was queued, that is between the moment it reached event a and the moment the host set
mark b. How much of that it was busy is known from stretches of the same kind that the GPU began late, because the queue
was full or a delay had been queued: those hold no idle time. Idle time is booked as what the host did meanwhile: first
as what queues nothing, then as launching.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from fulltilt.recorder.marks import ActivityTimes, Point, Totals

# Both clocks are compared this often, in so little time; crystals differ by some ten microseconds in a second.
COMPARE_EVERY_NS, COMPARED_WITHIN_NS, ASK_FOR_NS = 1e9, 60_000, 500_000

Queued = tuple[Any, int]  # an event, and the host's time before it was queued


class CudaClock:
    """Records events of the current stream on the training thread, and resolves them on the observer's."""

    def __init__(self, torch: Any) -> None:
        self._cuda = torch.cuda
        self._capturing = torch.cuda.is_current_stream_capturing
        self._pool: deque[Any] = deque()
        self._cycles_per_s = 1.9e9  # of today's GPUs; a slower one only waits a little longer
        # An event on a stream of our own is reached at once, whatever else the GPU does.
        self._stream = self._cuda.Stream(priority=-1)
        # The only deliberate wait: with an empty queue, host and GPU are at the same point in time.
        self._cuda.synchronize()
        self._reference = self._cuda.Event(enable_timing=True)
        self._reference.record()
        self._reference.synchronize()
        self._reference_ns = self._compared_ns = float(time.perf_counter_ns())

    def record(self) -> Queued | None:
        """An event at the current end of the current stream. Safe, and None, while a CUDA graph is captured."""
        if self._capturing():
            return None
        try:
            event = self._pool.pop()
        except IndexError:
            event = self._cuda.Event(enable_timing=True)
        queued_ns = time.perf_counter_ns()
        event.record()
        return event, queued_ns

    def delay(self, seconds: float) -> None:
        """Keep the GPU busy for about ``seconds`` with a kernel that counts cycles, so that the host has a lead."""
        if not self._capturing():
            self._cuda._sleep(int(seconds * self._cycles_per_s))

    def resolve(self, queued: Queued) -> float | None:
        """When the GPU reached the event, in host nanoseconds; None when it has not yet."""
        event, queued_ns = queued
        if not event.query():
            return None
        seen_ns = float(time.perf_counter_ns())
        reached_ns = self._reference_ns + float(self._reference.elapsed_time(event)) * 1e6
        possible_ns = min(max(reached_ns, float(queued_ns)), seen_ns)
        self._reference_ns += possible_ns - reached_ns
        if seen_ns - self._compared_ns > COMPARE_EVERY_NS and not self._compare():
            # CUDA returns milliseconds in 32 bits: the reference must not be long ago.
            self._reference, self._reference_ns = event, possible_ns
        else:
            self._pool.append(event)
        return possible_ns

    def _compare(self) -> bool:
        """Compare both clocks again. False: that took too long to be exact."""
        event = self._cuda.Event(enable_timing=True)
        began_ns = time.perf_counter_ns()
        self._compared_ns = float(began_ns)
        event.record(self._stream)
        while not event.query() and time.perf_counter_ns() - began_ns < ASK_FOR_NS:
            pass
        ended_ns = time.perf_counter_ns()
        if ended_ns - began_ns >= COMPARED_WITHIN_NS or not event.query():
            return False
        self._reference, self._reference_ns = event, (began_ns + ended_ns) / 2
        return True


# A lead is given at this step, and again at four times as many, if the GPU is not behind anyway. Each costs about a
# step's worth of host work: 2 % of a run of 100 steps, a third of that in one of 1,000. Until the length of the GPU's
# work is known, they come at twice as many.
FIRST_AT_STEP = 12
AGAIN, UNTIL_KNOWN = 4, 2
LEAD = 1.3
LONGEST_DELAY_S = 0.2


class Calibration:
    """The host's lead over the GPU: whether one was asked for or is being used up, and when the next one comes."""

    def __init__(self) -> None:
        self.under_way = False
        self.asked = False
        self.again_delay_s = 0.0
        self._delay_s = 0.0
        self._from = Point.NONE
        self._at_step = FIRST_AT_STEP

    def due(self, steps: int) -> bool:
        """Whether to ask for a lead after this many steps."""
        return not self.asked and steps >= self._at_step

    def ask(self, steps: int, queueing_s: float, behind_s: float, syncs: float, work_known: bool) -> None:
        """Ask for a lead, unless the GPU is behind the host by a step anyway."""
        self._at_step = steps * (AGAIN if work_known else UNTIL_KNOWN)
        if behind_s < queueing_s < LONGEST_DELAY_S / LEAD:
            # The driver's queue holds about a thousand kernels: every other time the lead is given for backward alone.
            self._from = Point.BATCH if self._from is not Point.BATCH else Point.BACKWARD
            self._delay_s = LEAD * queueing_s
            # Each blocking call of a step uses the lead up, and between two of them there is less to queue. The
            # optimizer after the last one may need a longer lead: that leaves some doubt (see GpuTime).
            self.again_delay_s = 2 * LEAD * queueing_s / (1 + syncs // steps)
            self.asked = True

    def begin(self, point: Point) -> float | None:
        """The delay to queue at ``point``; None if no lead was asked for there."""
        if not self.asked or self._from is not point:
            return None
        self.asked, self.under_way = False, True
        return self._delay_s


# At these the host queues kernels, or is blocked while the GPU works. At anything else it queues none: a GPU without
# work stays idle throughout.
QUEUES_KERNELS = frozenset({"user", "backward", "optimizer", "paused", "sync"})
# What a pause books as it is.
BOOKED_IN_PAUSE = frozenset({"data_wait", "epoch_turnover", "user", "long_user"})
# Between these points the GPU only copies; after a step, where no loader brings batches.
COPIES = {(begin, Point.TRANSFER) for begin in (Point.BATCH, Point.STEP, Point.TRANSFER)}
# Stretches between these hold no kernels, as long as nothing better is known.
NO_WORK = {(Point.STEP, Point.BATCH), (Point.STEP, Point.EVAL), (Point.EVAL, Point.BATCH), *COPIES}
# A running mean over about this many stretches follows a job whose work changes.
REMEMBERED = 32
# A calibrated stretch that may have been idle for this share still shows how long its work takes.
DOUBT = 0.15

Held = tuple[float, float, str]  # a stretch of host time: begin, end, label


class GpuTime:
    """The GPU's time as it advances from event to event."""

    def __init__(self, start_ns: float, point: Point) -> None:
        self.position_ns = start_ns
        self.lag_ns = 0.0
        # How long the GPU is busy in a stretch of each kind, by those that it began late, and how many there were.
        self._busy_ns: dict[tuple[Point, Point], float] = {}
        self._seen: dict[tuple[Point, Point], int] = {}
        self.held: list[Held] = []
        self._point = point
        # Parts of a stretch that calibrating delays cut off, and how long the GPU may have been idle in them.
        self._partial_ns = self._doubtful_ns = 0.0

    def advance(self, host_ns: float, gpu_ns: float, point: Point, times: ActivityTimes) -> None:
        """Book the stretch up to a mark: the host set it at ``host_ns``, the GPU reached its event at ``gpu_ns``."""
        begin, end = self.position_ns, max(gpu_ns, self.position_ns)
        self.position_ns = end
        lag, self.lag_ns = max(0.0, self.lag_ns), end - host_ns
        span = end - begin
        held, self.held = self.held, []
        dry_until = min(host_ns, end)
        may_idle = max(0.0, dry_until - begin)
        if point is Point.DELAY:
            times.by_label["observer"] += span
            return
        if point is Point.SYNCED:
            times.by_label["gpu_busy"] += span
            self._partial_ns += span
            self._doubtful_ns += may_idle
            return
        kind, self._point = (self._point, point), point
        partial, doubtful = self._partial_ns, self._doubtful_ns + may_idle
        self._partial_ns = self._doubtful_ns = 0.0
        if any(label == "validation" for *_, label in held):
            idle = _book_after_validation(begin, dry_until, held, times)
            times.by_label["validation"] += span - idle
            return
        if any(label == "paused" for *_, label in held):
            left = span
            for began, ended, label in held:
                if label in BOOKED_IN_PAUSE:
                    # A long stretch of the host's own cost the GPU what its queue did not cover.
                    own = label in ("user", "long_user")
                    booked = min(left, max(0.0, ended - began - lag * own))
                    times.by_label["long_user" if own else label] += booked
                    left -= booked
            times.by_label["paused"] += left
            return
        if not doubtful or (partial and doubtful <= DOUBT * (partial + span)):
            self._learn(kind, partial + span - doubtful / 2)
        expected = self._busy_ns.get(kind, 0.0 if kind in NO_WORK else None)
        idle = 0.0 if expected is None else min(max(0.0, span - expected), may_idle)
        times.by_label["transfer" if kind in COPIES else "gpu_busy"] += span - idle
        if idle:
            _book_idle(idle, begin, dry_until, held, times)

    def _learn(self, kind: tuple[Point, Point], ns: float) -> None:
        """Learn the length of a stretch that holds no idle time."""
        self._seen[kind] = self._seen.get(kind, 0) + 1
        old = self._busy_ns.get(kind, ns)
        self._busy_ns[kind] = old + (ns - old) / min(self._seen[kind], REMEMBERED)

    @property
    def knows_a_step(self) -> bool:
        """Whether both halves of a step were seen without idle time."""
        return {Point.BACKWARD, Point.STEP} <= {end for _, end in self._busy_ns}

    def drain(self, host_ns: float, times: ActivityTimes) -> None:
        """The job is over and the queue empty: book what the host did since the last event."""
        for began, ended, label in self.held:
            times.by_label[label] += max(0.0, ended - max(began, self.position_ns))
        self.held.clear()
        self.position_ns = max(host_ns, self.position_ns)


def _book_after_validation(begin: float, end: float, held: list[Held], times: ActivityTimes) -> float:
    """Book what the host did after a validation while the GPU was idle. Returns how long that was."""
    first = next(place for place, (*_, label) in enumerate(held) if label == "validation")
    later = [(began, ended, label) for began, ended, label in held[first:] if label != "validation"]
    idle = sum(max(0.0, min(ended, end) - max(began, begin)) for began, ended, _ in later)
    if idle:
        _book_idle(idle, begin, end, later, times)
    return idle


def _book_idle(idle: float, begin: float, end: float, held: list[Held], times: ActivityTimes) -> None:
    quiet: Totals[str] = Totals()
    user = 0.0
    for began, ended, label in held:
        overlap = max(0.0, min(ended, end) - max(began, begin))
        if label == "user":
            user += overlap
        elif label not in QUEUES_KERNELS and overlap:
            quiet[label] += overlap
    total = sum(quiet.values())
    booked = min(idle, total)
    for label, overlap in quiet.items():
        times.by_label[label] += booked * overlap / total
    times.by_label["launching"] += idle - booked
    times.phases["launching_user"] += user
