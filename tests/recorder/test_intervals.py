"""Intervals close: whatever the marks, every nanosecond has one label in one interval."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulltilt.recorder.attribution import Seen, Usual, attribute
from fulltilt.recorder.intervals import Interval, IntervalBuilder
from fulltilt.recorder.marks import (
    Activity,
    ActivityTimes,
    BackwardBegan,
    BackwardEnded,
    BatchArrived,
    BookedInPause,
    EvalMode,
    Finished,
    Mark,
    OptimizerStepped,
    PassBegan,
    PassEnded,
    Point,
    StepsCounted,
    Totals,
    WaitBegan,
)
from fulltilt.recorder.steps import BurstPlan, Bursts
from fulltilt.records import BUCKETS

MS = 1_000_000


class Loop:
    """A training thread on a clock of its own: says what it does and for how long."""

    def __init__(self) -> None:
        self.t = 0
        self.builder = IntervalBuilder(0)
        self.gpu = False
        self.gpu_free = 0.0

    def mark(self, activity: Activity, fact: Any = None, point: Point = Point.NONE) -> None:
        reached = None
        if self.gpu and point:
            self.gpu_free = reached = max(self.gpu_free, float(self.t))
        self.builder.feed(Mark(self.t, activity, fact, point), reached)

    @property
    def intervals(self) -> list[Interval]:
        return self.builder.closed

    def spend(self, ms: float, gpu_ms: float = 0.0) -> None:
        """Host time passes; work of ``gpu_ms`` is queued at its beginning."""
        if gpu_ms:
            self.gpu_free = max(self.gpu_free, float(self.t)) + gpu_ms * MS
        self.t += int(ms * MS)

    def draw(self, ms: float, loader: int = 0, evaluating: bool = False, first: bool = False, workers: int = 0) -> None:
        self.mark(Activity.DATA_WAIT, WaitBegan(evaluating))
        self.spend(ms)
        fact = BatchArrived(loader, 8, evaluating, first, workers)
        self.mark(Activity.USER, fact, Point.NONE if evaluating else Point.BATCH)

    def backward(self, ms: float, gpu_ms: float = 0.0) -> None:
        self.mark(Activity.BACKWARD, BackwardBegan(), Point.BACKWARD)
        self.spend(ms, gpu_ms)
        self.mark(Activity.USER, BackwardEnded())

    def step(self, ms: float, optimizer: int = 1, skipped: bool = False) -> None:
        self.mark(Activity.OPTIMIZER)
        self.spend(ms)
        self.mark(Activity.USER, OptimizerStepped(optimizer, skipped), Point.STEP)

    def finish(self) -> list[Interval]:
        self.mark(Activity.USER, Finished())
        return self.intervals

    def label(self, name: str) -> float:
        return sum(interval.times.by_label.get(name, 0.0) for interval in self.intervals) / MS

    @property
    def steps(self) -> int:
        return sum(interval.steps for interval in self.intervals)

    @property
    def samples(self) -> int:
        return sum(interval.samples or 0 for interval in self.intervals)


def closes(intervals: list[Interval]) -> bool:
    for interval in intervals:
        assert sum(interval.times.by_label.values()) == pytest.approx(interval.t1_ns - interval.t0_ns, abs=2)
    for one, other in pairwise(intervals):
        assert one.t1_ns == other.t0_ns
    return True


def train(loop: Loop, steps: int, wait: float = 2, user: float = 3, backward: float = 4, step: float = 1) -> None:
    for _ in range(steps):
        loop.draw(wait)
        loop.spend(user)
        loop.backward(backward)
        loop.step(step)


def test_a_plain_loop_is_booked_by_activity() -> None:
    loop = Loop()
    loop.spend(100)
    train(loop, 5)
    loop.spend(7)
    assert closes(loop.finish())
    assert (loop.steps, loop.samples) == (5, 40)
    assert loop.label("startup") == 102  # up to and with the first batch
    assert loop.label("data_wait") == 8
    assert loop.label("backward") == 20
    assert loop.label("optimizer") == 5
    assert loop.label("user") == 15 + 7


def test_accumulation_makes_one_step_of_several_batches() -> None:
    loop = Loop()
    for _ in range(3):
        for _ in range(4):
            loop.draw(1)
            loop.backward(2)
        loop.step(1)
    assert closes(loop.finish())
    assert (loop.steps, loop.samples, sum(t.batches for t in loop.intervals)) == (3, 96, 12)


def test_two_optimizers_in_one_iteration_are_one_step() -> None:
    loop = Loop()
    for _ in range(4):
        loop.draw(1)
        loop.backward(2)
        loop.step(1, optimizer=1)
        loop.spend(3)
        loop.backward(2)
        loop.step(1, optimizer=2)
    assert closes(loop.finish())
    assert (loop.steps, loop.samples) == (4, 32)


def test_without_a_loader_the_same_optimizer_again_is_a_new_step() -> None:
    loop = Loop()
    for _ in range(6):
        loop.spend(2)
        loop.backward(2)
        loop.step(1)
    assert closes(loop.finish())
    assert loop.steps == 6
    assert all(interval.samples is None for interval in loop.intervals)


def test_weights_updated_by_hand_count_a_step_for_each_backward() -> None:
    loop = Loop()
    for _ in range(100):
        loop.draw(1)
        loop.backward(2)
        loop.spend(1)
    assert closes(loop.finish())
    assert (loop.steps, loop.samples) == (100, 800)


def test_validation_is_apart_and_its_batches_do_not_count() -> None:
    loop = Loop()
    train(loop, 3)
    for _ in range(4):
        loop.draw(5, loader=1, evaluating=True)
        loop.spend(6)
    loop.mark(Activity.DATA_WAIT, WaitBegan(True))
    loop.mark(Activity.USER, PassEnded(1, True, 0))
    train(loop, 3)
    assert closes(loop.finish())
    assert loop.label("validation") == 44
    assert (loop.steps, loop.samples) == (6, 48)


def test_eval_mode_is_validation_without_any_loader() -> None:
    loop = Loop()
    train(loop, 2)
    loop.mark(Activity.USER, EvalMode(True))
    loop.spend(30)
    loop.mark(Activity.USER, EvalMode(False))
    train(loop, 2)
    assert closes(loop.finish())
    assert loop.label("validation") == 30


def test_an_undeclared_evaluation_is_found_at_the_end_of_its_pass() -> None:
    loop = Loop()
    train(loop, 3)
    loop.mark(Activity.EPOCH_TURNOVER, PassBegan(1, False))
    loop.mark(Activity.USER)
    for _ in range(5):
        loop.draw(4, loader=1)
        loop.spend(6)
    loop.mark(Activity.DATA_WAIT, WaitBegan(False))
    loop.mark(Activity.USER, PassEnded(1, False, 0))
    train(loop, 3)
    assert closes(loop.finish())
    assert loop.label("validation") == 50
    assert (loop.steps, loop.samples) == (6, 48)


def test_restarting_workers_is_turnover() -> None:
    loop = Loop()
    train(loop, 2)
    loop.mark(Activity.EPOCH_TURNOVER, PassBegan(0, False))
    loop.spend(40)
    loop.mark(Activity.USER)
    loop.draw(25, first=True, workers=2)
    loop.backward(4)
    loop.step(1)
    assert closes(loop.finish())
    assert loop.label("epoch_turnover") == 65


def test_saving_is_a_checkpoint_also_inside_validation() -> None:
    loop = Loop()
    train(loop, 2)
    loop.mark(Activity.USER, EvalMode(True))
    loop.mark(Activity.CHECKPOINT)
    loop.spend(50)
    loop.mark(Activity.USER)
    loop.mark(Activity.USER, EvalMode(False))
    train(loop, 1)
    assert closes(loop.finish())
    assert loop.label("checkpoint") == 50


def test_a_skipped_step_is_a_step() -> None:
    loop = Loop()
    for number in range(4):
        loop.draw(1)
        loop.backward(1)
        loop.step(1, skipped=number == 2)
    assert closes(loop.finish())
    assert (loop.steps, sum(interval.skipped for interval in loop.intervals)) == (4, 1)


def test_a_million_steps_make_few_intervals_that_still_close() -> None:
    loop = Loop()
    for _ in range(20_000):
        loop.draw(0.2)
        loop.backward(1)
        loop.step(0.3)
    assert closes(loop.finish())
    assert (loop.steps, loop.samples) == (20_000, 160_000)
    assert len(loop.intervals) < 1000
    assert max(interval.step_max_ns for interval in loop.intervals[1:]) == pytest.approx(1.5 * MS)


def test_time_in_a_pause_is_kept_apart_and_its_steps_count() -> None:
    loop = Loop()
    train(loop, 20)
    loop.mark(Activity.PAUSED)
    loop.spend(200)
    loop.mark(Activity.DATA_WAIT)  # a long wait is booked even then
    loop.spend(30)
    loop.mark(Activity.PAUSED)
    loop.mark(Activity.USER, StepsCounted(calls=25, drawn={0: (25, 200)}))
    train(loop, 20)
    assert closes(loop.finish())
    assert (loop.steps, loop.samples) == (65, 520)
    assert loop.label("paused") == 200
    assert loop.label("data_wait") == 2 * 39 + 30


def test_what_follows_the_last_step_is_an_interval_of_its_own() -> None:
    loop = Loop()
    train(loop, 150)  # by now an interval holds several steps
    loop.mark(Activity.USER, EvalMode(True))
    loop.spend(2000)
    assert closes(loop.finish())
    assert (loop.intervals[-1].steps, loop.intervals[-1].t1_ns - loop.intervals[-1].t0_ns) == (0, 2000 * MS)
    assert loop.intervals[-1].times.by_label == {"validation": 2000 * MS}
    assert loop.steps == 150


TORCH = {Activity.USER: Totals({"torch": 1.0})}


def divided(intervals: list[Interval], seen: Seen) -> dict[str, float]:
    """Seconds by bucket, with time in a pause divided as the rest of it."""
    usual, total = Usual(), dict.fromkeys(BUCKETS, 0.0)
    for interval in intervals:
        buckets = attribute(interval, seen, usual).buckets
        for name in BUCKETS:
            total[name] += getattr(buckets, name)
    return total


def test_what_a_step_waits_for_other_ranks_is_communication() -> None:
    times = ActivityTimes(Totals({"backward": 8e9, "optimizer": 1e9, "data_wait": 1e9}))
    for waited in (3.0, 30.0):
        interval = Interval(0.0, 10e9, steps=2, times=times, step_max_ns=5e9)
        buckets = attribute(interval, TORCH, Usual(), exposed_communication_s=waited / 2).buckets
        assert buckets.communication_s == pytest.approx(min(waited, 9.0))
        assert buckets.compute_s + buckets.communication_s == pytest.approx(9.0)


def test_what_hooks_take_inside_backward_is_host_code() -> None:
    times = ActivityTimes(Totals({"backward": 8e9, "optimizer": 1e9, "user": 1e9}))
    interval = Interval(0.0, 10e9, 1, 0, 1, 8, 0, times, 10e9, 0.0, gpu=False)
    buckets = attribute(interval, TORCH, Usual(), held_up=0.75).buckets
    assert (buckets.host_code_s, buckets.compute_s) == (pytest.approx(6.0), pytest.approx(4.0))
    assert attribute(interval, TORCH, Usual()).buckets.compute_s == pytest.approx(10.0)


@pytest.mark.parametrize("gpu", [False, True], ids=["on a CPU", "on a GPU"])
def test_workers_that_end_with_their_pass_in_a_pause_are_turnover(gpu: bool) -> None:
    loop = started_on_gpu() if gpu else Loop()
    train(loop, 4)
    loop.mark(Activity.PAUSED, None, Point.STEP)
    loop.spend(30)
    loop.mark(Activity.DATA_WAIT)
    loop.spend(50)
    loop.mark(Activity.PAUSED, BookedInPause(50 * MS, turnover=True))
    loop.mark(Activity.USER, StepsCounted(3, {}), Point.STEP)
    loop.mark(Activity.USER, PassEnded(0, False, 4))
    train(loop, 2)
    assert closes(loop.finish())
    assert loop.label("epoch_turnover") == 50
    assert loop.label("paused") == 30


def pause(loop: Loop, steps: int, wait: float, other: float, apart: Activity | None = None) -> None:
    """So many steps in a pause; what is ``apart``, the wait or the other time, is booked as it is."""
    loop.mark(Activity.PAUSED)
    for _ in range(steps):
        for activity, ms in ((Activity.DATA_WAIT, wait), (Activity.USER, other)):
            loop.mark(activity if activity is apart else Activity.PAUSED)
            loop.spend(ms)
            booked = BookedInPause(int(ms * MS)) if activity is apart else None
            loop.mark(Activity.PAUSED, booked)
    loop.mark(Activity.USER, StepsCounted(calls=steps, drawn={0: (steps, 8 * steps)}))


def test_waits_that_are_booked_in_a_pause_are_not_divided_into_it_again() -> None:
    loop = Loop()
    for _ in range(4):
        train(loop, 20, wait=3, user=0, backward=0.5, step=0.5)
        pause(loop, 100, wait=3, other=1, apart=Activity.DATA_WAIT)
    assert closes(loop.finish())
    found = divided(loop.intervals, TORCH)
    assert found["data_wait_s"] == pytest.approx(0.75 * sum(found.values()), rel=0.02)


def test_a_rare_long_step_is_not_taken_for_the_usual_one() -> None:
    loop = Loop()
    train(loop, 20, wait=0, user=0, backward=0.5, step=0.5)
    for _ in range(4):
        train(loop, 1, wait=0, user=50, backward=0.5, step=0.5)  # a plot is drawn while steps are measured
        train(loop, 15, wait=0, user=0, backward=0.5, step=0.5)
        pause(loop, 100, wait=0, other=1)
        pause(loop, 1, wait=0, other=50, apart=Activity.USER)  # and again in a pause
    assert closes(loop.finish())
    found = divided(loop.intervals, {Activity.DATA_WAIT: Totals({"host": 1.0}), Activity.PAUSED: Totals({"host": 1.0})})
    assert found["host_code_s"] == pytest.approx(8 * 0.05, rel=0.02)


def test_measured_calls_stand_for_those_in_a_pause_before_them() -> None:
    bursts = Bursts(plan=BurstPlan(measured_calls=16, counted_calls=112))
    counted = 0.0
    for call in range(300):
        bursts.measured()
        counted += bursts.weight
        assert bursts.weight == 1.0, call
    for _ in range(3):
        bursts.pause(0)
        bursts.counted_calls = 112
        bursts.resume()
        for _ in range(16):
            counted += bursts.weight
            bursts.measured()
    assert counted == 300 + 3 * 128
    assert bursts.scale == 1.0
    bursts.pause(0)
    bursts.counted_calls = 57
    bursts.resume()  # the job is over before anything else is measured
    assert counted * bursts.scale == pytest.approx(300 + 3 * 128 + 57)


# --------------------------------------------------------------------------- with a GPU


def gpu_step(loop: Loop, wait: float, queue: float, work: float) -> None:
    """One step: ``queue`` ms to launch, ``work`` ms on the GPU, half of each before backward."""
    loop.draw(wait)
    loop.spend(queue / 2, work / 2)
    loop.backward(queue / 2, work / 2)
    loop.step(0)


def started_on_gpu() -> Loop:
    loop = Loop()
    loop.draw(1)
    loop.backward(1)
    loop.gpu = True
    loop.step(1)
    return loop


def test_a_gpu_that_never_waits_is_busy_throughout() -> None:
    loop = started_on_gpu()
    for _ in range(20):
        gpu_step(loop, wait=1, queue=4, work=20)
    assert closes(loop.finish())
    intervals = loop.intervals[2:-2]
    busy = sum(interval.times.by_label.get("gpu_busy", 0.0) for interval in intervals)
    whole = sum(interval.t1_ns - interval.t0_ns for interval in intervals)
    assert busy / whole > 0.99


def test_a_starved_gpu_waits_for_data() -> None:
    loop = started_on_gpu()
    for _ in range(3):  # a queue that fills up shows how long the work takes
        gpu_step(loop, wait=0, queue=1, work=10)
    for _ in range(50):
        gpu_step(loop, wait=40, queue=1, work=10)
    assert closes(loop.finish())
    intervals = loop.intervals[6:-2]
    whole = sum(interval.t1_ns - interval.t0_ns for interval in intervals)
    waited = sum(interval.times.by_label.get("data_wait", 0.0) for interval in intervals)
    busy = sum(interval.times.by_label.get("gpu_busy", 0.0) for interval in intervals)
    # Of 41 ms a step the GPU works 10, and the host waits for data while it is idle.
    assert busy / whole == pytest.approx(10 / 41, abs=0.03)
    assert waited / whole == pytest.approx(31 / 41, abs=0.04)


@pytest.mark.parametrize(("kind", "bucket"), [("host", "host_code_s"), ("epoch_turnover", "epoch_turnover_s")])
def test_what_is_too_long_for_launching_counts_by_its_own_samples(kind: str, bucket: str) -> None:
    loop = started_on_gpu()
    for _ in range(3):
        gpu_step(loop, wait=0, queue=1, work=4)
    for _ in range(20):
        loop.spend(70)
        for _ in range(10):
            gpu_step(loop, wait=0, queue=1, work=4)
    assert closes(loop.finish())
    # Nearly all samples saw launching, which the GPU never waits for: of 80 ms it has work for 40.
    seen = {
        Activity.USER: Totals({"torch": 1.0}),
        Activity.OPTIMIZER: Totals({"torch": 9.0}),
        Activity.LONG_USER: Totals({kind: 0.1}),
    }
    told = divided(loop.intervals, seen)
    assert told[bucket] / sum(told.values()) == pytest.approx(0.5, abs=0.03)


def test_what_the_host_does_behind_a_validation_is_not_the_gpus_validating() -> None:
    loop = started_on_gpu()
    for _ in range(3):
        gpu_step(loop, wait=0, queue=1, work=10)
    loop.mark(Activity.USER, EvalMode(True), Point.EVAL)
    loop.spend(100, 30)
    loop.mark(Activity.DATA_WAIT, WaitBegan(True))
    loop.mark(Activity.USER, PassEnded(1, True, 0), Point.EVAL)
    loop.spend(40)  # a metric, as far as anybody knows
    loop.builder.feed(Mark(loop.t, None, EvalMode(False)))  # type: ignore[arg-type]  # a sample has shown its end
    loop.spend(300)
    loop.mark(Activity.CHECKPOINT)
    loop.spend(100)
    loop.mark(Activity.USER)
    gpu_step(loop, wait=0, queue=1, work=10)
    assert closes(loop.finish())
    assert loop.label("checkpoint") == 100
    assert loop.label("long_user") == 300


def reading_step(loop: Loop, lead: float = 0.0, last: float | None = None) -> None:
    """2 ms to queue 6 ms of work, then ten readings that each queue 0.3 ms of host work for 0.05 ms on the GPU.

    ``last``: the lead behind the last reading, where it is another.
    """

    def give_lead(ms: float) -> None:
        if lead:
            loop.gpu_free = max(loop.gpu_free, float(loop.t)) + ms * MS
            loop.mark(Activity.USER, None, Point.DELAY)

    loop.draw(0)
    give_lead(lead)
    loop.spend(1, 3)
    loop.backward(1, 3)
    for number in range(10):
        loop.spend(0.3, 0.05)
        loop.mark(Activity.SYNC, None, Point.SYNCED if lead else Point.NONE)
        loop.t = max(loop.t, int(loop.gpu_free))
        loop.mark(Activity.USER)
        give_lead(lead / 5 if last is None or number < 9 else last)
    loop.step(0.2)


def test_readings_that_let_the_gpu_run_dry_are_charged_with_it() -> None:
    loop = started_on_gpu()
    for number in range(60):
        reading_step(loop, lead=8.0 if number == 12 else 0.0)
    assert closes(loop.finish())
    intervals = loop.intervals[20:-2]
    whole = sum(interval.t1_ns - interval.t0_ns for interval in intervals)
    seen = [attribute(interval, TORCH, Usual()) for interval in intervals]
    # A step takes 6.3 ms for the first reading and 9 × 0.35 ms for the others: 6.5 ms of it are work.
    assert sum(one.buckets.compute_s for one in seen) * 1e9 / whole == pytest.approx(6.5 / 9.65, abs=0.06)
    assert sum(one.buckets.sync_s for one in seen) * 1e9 / whole == pytest.approx(3.15 / 9.65, abs=0.06)


def test_a_lead_that_ends_a_little_early_teaches_all_the_same() -> None:
    """Of many readings in a row one comes late: before, nothing was learnt, and every idle moment counted as work."""
    loop = started_on_gpu()
    for number in range(60):
        reading_step(loop, lead=8.0 if number == 12 else 0.0, last=0.05)
    assert closes(loop.finish())
    intervals = loop.intervals[20:-2]
    whole = sum(interval.t1_ns - interval.t0_ns for interval in intervals)
    seen = [attribute(interval, TORCH, Usual()) for interval in intervals]
    assert sum(one.buckets.compute_s for one in seen) * 1e9 / whole == pytest.approx(6.5 / 9.65, abs=0.08)


def test_time_that_samples_miss_counts_by_what_it_came_after() -> None:
    """Forward is short and holds the interpreter lock: samples due in it come in the sleep behind the step."""
    loop = Loop()
    for _ in range(30):
        loop.draw(0)
        loop.spend(2)  # forward
        loop.backward(1)
        loop.step(1)
        loop.spend(5)  # asleep
    loop.finish()
    seen = {Activity.DATA_WAIT: Totals({"torch": 1.0}), Activity.OPTIMIZER: Totals({"host": 300.0})}
    buckets = [attribute(interval, seen, Usual()).buckets for interval in loop.intervals[1:-1]]
    host_s, all_s = sum(one.host_code_s for one in buckets), sum(one.total_s for one in buckets)
    assert host_s / all_s == pytest.approx(5 / 9, abs=0.01)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(list(Activity)),
            st.sampled_from(
                [
                    None,
                    BackwardBegan(),
                    BackwardEnded(),
                    BatchArrived(0, 4, False, False, 0),
                    BatchArrived(1, 4, True, True, 2),
                    BatchArrived(2, None, False, True, 2),
                    PassBegan(0, False),
                    PassEnded(0, False, 2),
                    PassEnded(1, True, 0),
                    OptimizerStepped(1, False),
                    OptimizerStepped(2, True),
                    EvalMode(True),
                    EvalMode(False),
                    WaitBegan(True),
                    WaitBegan(False),
                    StepsCounted(3, {0: (3, 12)}),
                ]
            ),
            st.sampled_from(list(Point)),
            st.integers(0, 50),
            st.integers(0, 80),
        ),
        max_size=60,
    ),
    st.booleans(),
)
def test_every_sequence_of_marks_closes(marks: list[tuple[Any, ...]], gpu: bool) -> None:
    loop = Loop()
    loop.gpu = gpu
    for activity, fact, point, ms, gpu_ms in marks:
        loop.mark(activity, fact, point)
        loop.spend(ms, gpu_ms if gpu else 0.0)
    intervals = loop.finish()
    assert closes(intervals)
    end = intervals[-1].t1_ns if intervals else 0.0
    assert sum(sum(interval.times.by_label.values()) for interval in intervals) == pytest.approx(
        end, abs=len(intervals) + 2
    )
    assert end >= loop.t - 1


@pytest.mark.parametrize("measured", [0, 4])
def test_time_in_a_pause_is_no_phase_and_the_mean_step_keeps_its_length(measured: int) -> None:
    """A mean step of 5.3 s was drawn for a loop of 4 ms: time in a pause was stretched as code of the step."""
    loop = Loop()
    train(loop, 120, wait=1, user=1, backward=1, step=1)
    loop.spend(0.05)
    pause(loop, 200, wait=2, other=2)
    train(loop, measured, wait=1, user=1, backward=1, step=1)
    steps = seconds = 0.0
    for interval in loop.finish():
        phases = attribute(interval, TORCH, Usual()).phases
        if interval.steps and phases is not None:
            steps += interval.steps
            seconds += phases.load_s + phases.forward_s + phases.backward_s + phases.optimizer_s + phases.other_s
    assert steps >= 100
    assert seconds / steps == pytest.approx(0.004, rel=0.05)


def test_a_long_stretch_in_a_pause_on_a_gpu_does_not_lengthen_the_mean_step() -> None:
    loop = started_on_gpu()
    for _ in range(120):
        gpu_step(loop, wait=0, queue=1, work=4)
    for _ in range(10):
        loop.mark(Activity.PAUSED, None, Point.STEP)
        for _ in range(10):  # ten steps are queued, then the host is busy for longer than the GPU with them
            loop.spend(10, 40)
            loop.mark(Activity.USER)
            loop.spend(60)
            loop.mark(Activity.PAUSED, BookedInPause(60 * MS))
        loop.mark(Activity.USER, StepsCounted(100, {}), Point.STEP)
        for _ in range(16):
            gpu_step(loop, wait=0, queue=1, work=4)
    steps = gpu_s = 0.0
    for interval in loop.finish():
        phases = attribute(interval, TORCH, Usual()).phases
        if interval.steps and phases is not None:
            assert phases.gpu_busy_s is not None
            assert phases.gpu_idle_s is not None
            steps += interval.steps
            gpu_s += phases.gpu_busy_s + phases.gpu_idle_s
    assert steps >= 120
    assert gpu_s / steps == pytest.approx(0.004, rel=0.2)


def test_what_came_behind_a_step_is_known_of_each_stretch() -> None:
    """As in a GAN: a forward pass of the other network, and averaged weights before the next batch."""
    builder, user = IntervalBuilder(0), Activity.USER
    order = (Activity.BACKWARD, Activity.OPTIMIZER, user, Activity.BACKWARD, Activity.OPTIMIZER, user, None)
    for now_ns, activity in enumerate((*order, user, Activity.DATA_WAIT, user)):
        builder.feed(Mark(10 * now_ns, activity, BackwardBegan() if activity is Activity.BACKWARD else None))
    behind = [builder.stretch_at(t_ns, 100)[1] for t_ns in (25, 45, 55, 75, 85, 95)]
    assert behind == [Activity.BACKWARD, None, Activity.DATA_WAIT, Activity.DATA_WAIT, None, None]


def test_a_stretch_too_long_for_launching_is_known_from_its_beginning_to_its_end() -> None:
    loop = started_on_gpu()
    began_ns = loop.t
    loop.spend(70)
    assert loop.builder.stretch_at(began_ns + 1, loop.t) == (True, None)  # it goes on
    gpu_step(loop, wait=1, queue=4, work=4)
    told = [loop.builder.stretch_at(began_ns + ms * MS, loop.t) for ms in (1, 69, 72)]
    assert told == [(True, Activity.DATA_WAIT), (True, Activity.DATA_WAIT), (False, None)]
