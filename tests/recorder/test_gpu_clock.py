"""Leads over the GPU are rare, are given where they were asked for, and only where the GPU has nothing queued."""

from __future__ import annotations

import pytest

from fulltilt.recorder.gpu_clock import (
    AGAIN,
    FIRST_AT_STEP,
    LEAD,
    LONGEST_DELAY_S,
    UNTIL_KNOWN,
    Calibration,
    CudaClock,
    GpuTime,
)
from fulltilt.recorder.marks import ActivityTimes, Point


def asked(
    steps: int = FIRST_AT_STEP, *, queueing_s: float = 0.01, behind_s: float = 0.0, syncs: float = 0.0
) -> Calibration:
    calibration = Calibration()
    calibration.ask(steps, queueing_s, behind_s, syncs, work_known=False)
    return calibration


def test_a_lead_lasts_longer_than_a_step_takes_to_queue_and_is_given_once() -> None:
    calibration = asked()
    assert calibration.begin(Point.BACKWARD) is None
    assert calibration.begin(Point.BATCH) == pytest.approx(LEAD * 0.01)
    assert calibration.under_way
    assert calibration.begin(Point.BATCH) is None


def test_every_other_lead_is_for_backward_alone() -> None:
    calibration, given = Calibration(), []
    for steps in (12, 24, 48):
        calibration.ask(steps, 0.01, 0.0, 0.0, work_known=False)
        given.append([point for point in (Point.BATCH, Point.BACKWARD) if calibration.begin(point) is not None])
    assert given == [[Point.BATCH], [Point.BACKWARD], [Point.BATCH]]


@pytest.mark.parametrize(
    ("queueing_s", "behind_s"), [(0.01, 0.02), (LONGEST_DELAY_S, 0.0)], ids=["the GPU is behind", "a lead too long"]
)
def test_no_lead_where_it_would_show_nothing(queueing_s: float, behind_s: float) -> None:
    calibration = asked(queueing_s=queueing_s, behind_s=behind_s)
    assert not calibration.asked
    assert calibration.begin(Point.BATCH) is None


@pytest.mark.parametrize(("known", "factor"), [(False, UNTIL_KNOWN), (True, AGAIN)])
def test_leads_come_at_ever_more_steps(known: bool, factor: int) -> None:
    calibration = Calibration()
    assert [calibration.due(steps) for steps in (FIRST_AT_STEP - 1, FIRST_AT_STEP)] == [False, True]
    calibration.ask(FIRST_AT_STEP, 0.01, 0.02, 0.0, work_known=known)
    assert [calibration.due(factor * FIRST_AT_STEP - less) for less in (1, 0)] == [False, True]


def test_a_second_lead_is_not_asked_for_before_the_first_was_given() -> None:
    assert not asked().due(1000)


def test_leads_behind_blocking_calls_share_what_there_is_to_queue() -> None:
    assert asked(syncs=0.0).again_delay_s == pytest.approx(2 * LEAD * 0.01)
    assert asked(12, syncs=36.0).again_delay_s == pytest.approx(2 * LEAD * 0.01 / 4)


def test_a_long_stretch_in_a_pause_costs_what_the_queue_does_not_cover() -> None:
    gpu = GpuTime(0.0, Point.STEP)
    gpu.advance(1e6, 6e6, Point.STEP, ActivityTimes())  # 5 ms of work lie in the queue
    gpu.held = [(1e6, 50e6, "user"), (50e6, 100e6, "paused")]
    times = ActivityTimes()
    gpu.advance(100e6, 100e6, Point.STEP, times)
    assert {label: ns for label, ns in times.by_label.items() if ns} == {"long_user": 44e6, "paused": 50e6}


@pytest.mark.parametrize("before", [Point.BATCH, Point.STEP], ids=["from a loader", "in a loop without one"])
def test_a_blocking_copy_is_no_work_of_the_gpu(before: Point) -> None:
    gpu = GpuTime(0.0, before)
    gpu.held = [(0.0, 6e6, "transfer")]
    times = ActivityTimes()
    gpu.advance(6e6, 6e6, Point.TRANSFER, times)
    assert {label: ns for label, ns in times.by_label.items() if ns} == {"transfer": 6e6}


# --------------------------------------------------------------------------- the clock itself


class FastGpu:
    """CUDA with a timer that runs 100 millionths fast; it reaches each event 10 µs after that was queued."""

    now_ns = 0

    def __init__(self) -> None:
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, _stream: object = None) -> None:
                self.at_ns = gpu.now_ns + 10_000
                gpu.now_ns += 8_000

            def query(self) -> bool:
                gpu.now_ns += 1_000
                return gpu.now_ns >= self.at_ns

            def synchronize(self) -> None:
                gpu.now_ns = max(gpu.now_ns, self.at_ns)

            def elapsed_time(self, other: Event) -> float:
                return (other.at_ns - self.at_ns) * 1.0001 * 1e-6

        self.cuda, self.Event = self, Event

    def Stream(self, priority: int) -> None:
        assert priority == -1

    def synchronize(self) -> None: ...

    def is_current_stream_capturing(self) -> bool:
        return False


def test_the_clock_follows_a_gpu_whose_timer_drifts_and_a_thread_that_is_held_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = FastGpu()
    monkeypatch.setattr("fulltilt.recorder.gpu_clock.time", type("T", (), {"perf_counter_ns": lambda: gpu.now_ns}))
    clock = CudaClock(gpu)
    for number in range(1000):
        queued = clock.record()
        assert queued is not None
        gpu.now_ns += 300_000 if number % 7 == 0 else 5_000  # until the mark is set, somebody else had the lock
        gpu.now_ns += 100_000_000  # the observer comes round
        reached_ns = clock.resolve(queued)
        assert reached_ns == pytest.approx(queued[0].at_ns, abs=150_000)
