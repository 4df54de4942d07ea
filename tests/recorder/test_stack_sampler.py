"""Stack samples go on in a pause: they name lines, and at a step that takes long they divide it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from fulltilt.recorder.attribution import Seen
from fulltilt.recorder.marks import Activity
from fulltilt.recorder.stack_sampler import (
    EARLY_SAMPLE_EVERY_S,
    LATE_NS,
    WEIGHT_OF_EARLIER_S,
    CallOrder,
    KindWeights,
    StackSampler,
)
from fulltilt.recorder.stacks.frames import LoopFrames, StackView
from fulltilt.recorder.steps import LONG_STEP_NS, Bursts
from fulltilt.recorder.validation import Evaluation


@dataclass
class FakeState:
    """Takes down what it is told."""

    lines: list[tuple[str, str | None, float]] = field(default_factory=list)

    def resolve_waiting(self, view: StackView) -> StackView:
        return view

    def evaluating(self, eval_mode: bool) -> bool:
        return eval_mode

    def sampled(self, activity: Activity, view: StackView, weight_s: float) -> None:
        self.lines.append((view.kind, view.call, weight_s))

    def sampled_in_validation(self, view: StackView, weight_s: float) -> None:
        self.lines.append(("validation", view.call, weight_s))


@dataclass
class FakeIntervals:
    """What the marks so far have shown."""

    since_ns: float = 0.0
    long_until_ns: float = 0.0
    long_ns: float = 20e6
    comes_next: Activity | None = None

    def stretch_at(self, t_ns: int, now_ns: int) -> tuple[bool, Activity | None]:
        return t_ns < self.long_until_ns, self.comes_next


@dataclass
class FakeRecorder:
    """A recorder whose training thread is this one."""

    thread_id: int | None
    state: Any = field(default_factory=FakeState)
    clock: Any = None
    bursts: Bursts = field(default_factory=Bursts)
    loop_frames: LoopFrames = field(default_factory=LoopFrames)
    activity: Activity = Activity.PAUSED
    previous: Activity = Activity.USER
    before_previous: Activity = Activity.USER
    last_switch_ns: int = 0
    usual_step_s: float = 0.005
    training: bool = True
    eval_mode: bool = False
    evaluation: Evaluation = field(default_factory=Evaluation)
    intervals: FakeIntervals = field(default_factory=FakeIntervals)

    def evaluates(self, on: bool) -> None:
        self.eval_mode = on


@pytest.fixture
def recorder() -> Iterator[FakeRecorder]:
    done = threading.Event()
    thread = threading.Thread(target=lambda: done.wait(60))
    thread.start()
    yield FakeRecorder(thread.ident)
    done.set()
    thread.join()


def weight_of(seen: Seen) -> float:
    return sum(weight for kinds in seen.values() for weight in kinds.values())


def test_samples_in_a_pause_name_lines_and_divide_nothing(recorder: FakeRecorder) -> None:
    sampler = StackSampler(recorder)
    for _ in range(3):
        recorder.bursts.booked_ns = time.perf_counter_ns() + LONG_STEP_NS  # a step has just ended
        sampler.take(0, EARLY_SAMPLE_EVERY_S)
    assert [weight for _, _, weight in recorder.state.lines] == [EARLY_SAMPLE_EVERY_S] * 3
    assert not sampler.split()  # the measured steps tell how these divide


def test_samples_in_validation_name_lines_and_divide_nothing(recorder: FakeRecorder) -> None:
    recorder.activity, recorder.eval_mode = Activity.USER, True
    sampler = StackSampler(recorder)
    sampler.take(time.perf_counter_ns(), EARLY_SAMPLE_EVERY_S)
    assert [kind for kind, _, _ in recorder.state.lines] == ["validation"]
    assert not sampler.split()
    recorder.activity = Activity.DATA_WAIT  # for a batch of the validation's
    sampler.take(time.perf_counter_ns(), EARLY_SAMPLE_EVERY_S)
    recorder.activity, recorder.training = Activity.USER, False  # before the first step
    sampler.take(time.perf_counter_ns(), EARLY_SAMPLE_EVERY_S)
    assert len(recorder.state.lines) == 1


def test_a_long_step_in_a_pause_is_sampled_all_the_time(recorder: FakeRecorder) -> None:
    sampler = StackSampler(recorder)
    recorder.bursts.booked_ns = time.perf_counter_ns() - 20 * LONG_STEP_NS
    for _ in range(3):
        sampler.take(0, EARLY_SAMPLE_EVERY_S)
    weights = [weight for _, _, weight in recorder.state.lines]
    assert len(weights) == 3
    assert weights[0] >= 20 * LONG_STEP_NS * 1e-9  # the first stands for all of it so far
    assert list(sampler.split()) == [Activity.PAUSED]
    assert weight_of(sampler.split()) == pytest.approx(sum(weights))


def test_a_window_divides_by_its_own_samples_and_a_little_by_earlier_ones() -> None:
    weights = KindWeights()
    weights["torch"] += 10.0
    weights.begin_window()
    assert set(weights) == {"torch"}
    weights["host"] += 1.0
    assert weights == {"torch": pytest.approx(WEIGHT_OF_EARLIER_S), "host": 1.0}


def test_a_hook_that_holds_backward_up_is_told_from_torchs_own_part() -> None:
    inside: list[bool] = []  # not events: a sample of a hook inside threading's own code would see a wait
    done: list[bool] = []
    weights = torch.ones(1, requires_grad=True)

    def hook(_: torch.Tensor) -> None:
        inside.append(True)
        while not done:
            time.sleep(0.2)

    weights.register_hook(hook)
    thread = threading.Thread(target=lambda: (2 * weights).sum().backward())
    thread.start()
    while not inside and thread.is_alive():
        time.sleep(0.001)
    recorder = FakeRecorder(thread.ident, activity=Activity.BACKWARD)
    sampler = StackSampler(recorder)
    sampler.take(time.perf_counter_ns(), EARLY_SAMPLE_EVERY_S)
    done.append(True)
    thread.join()
    assert sampler._backward == {"host": pytest.approx(EARLY_SAMPLE_EVERY_S)}
    assert not sampler.split()
    assert {kind for kind, _, _ in recorder.state.lines} == {"host"}


def test_a_late_sample_of_what_began_after_it_weighs_nothing(recorder: FakeRecorder) -> None:
    """The training thread may switch between the clock and the sample: such samples had weighed less than nothing."""
    sampler = StackSampler(recorder)
    sampler._last_ns -= 10**9
    recorder.activity, recorder.last_switch_ns = Activity.USER, time.perf_counter_ns() + 10**9
    sampler.take(time.perf_counter_ns(), EARLY_SAMPLE_EVERY_S)
    assert [weight for _, _, weight in recorder.state.lines] == [0.0]


def test_a_sample_that_was_missed_stands_for_nothing_where_late_looks_weigh_nothing(recorder: FakeRecorder) -> None:
    """It was a division by zero, and all that the observer had to do then was left out."""
    sampler = StackSampler(recorder)
    sampler._last_ns -= 10**9
    recorder.activity, recorder.last_switch_ns = Activity.USER, time.perf_counter_ns() + 10**9
    sampler.take(time.perf_counter_ns() - LATE_NS, EARLY_SAMPLE_EVERY_S)
    recorder.activity, recorder.previous = Activity.OPTIMIZER, Activity.USER
    sampler.take(time.perf_counter_ns(), EARLY_SAMPLE_EVERY_S)
    assert weight_of(sampler.split()) == 0.0


@pytest.mark.parametrize(
    ("lasted_ms", "key", "kind"), [(15, Activity.BACKWARD, "torch"), (30, Activity.LONG_USER, "host")]
)
def test_on_a_gpu_what_torch_does_for_long_is_no_launching_from_its_beginning(
    recorder: FakeRecorder, monkeypatch: pytest.MonkeyPatch, lasted_ms: int, key: Activity, kind: str
) -> None:
    monkeypatch.setattr(
        "fulltilt.recorder.stack_sampler.view_of", lambda *_: StackView("torch", "train.py:3", "main", None)
    )
    recorder.clock, recorder.activity, recorder.previous = object(), Activity.USER, Activity.BACKWARD
    sampler = StackSampler(recorder)
    began_ns = recorder.last_switch_ns = time.perf_counter_ns()
    recorder.intervals.long_until_ns = began_ns + lasted_ms * 1_000_000 if lasted_ms > 20 else 0
    for length_ms in (5, 14):
        now_ns = began_ns + length_ms * 1_000_000
        monkeypatch.setattr(time, "perf_counter_ns", lambda now_ns=now_ns: now_ns)
        sampler.take(now_ns, 0.01)
    assert sampler.split() == {}  # no mark has come yet that ends the stretch
    recorder.intervals.since_ns = began_ns + lasted_ms * 1_000_000
    assert sampler.split() == {key: {kind: pytest.approx(0.02)}}
    assert [told for told, _, _ in recorder.state.lines] == [kind] * 2


@pytest.mark.parametrize(("clock", "kind"), [(None, "data_wait"), (object(), "torch")], ids=["CPU", "GPU"])
def test_what_a_generator_has_torch_do_on_cpus_makes_a_batch(
    recorder: FakeRecorder, monkeypatch: pytest.MonkeyPatch, clock: object, kind: str
) -> None:
    view = StackView("torch", "data.py:3", "augment", None, drawn_from=("train.py:9", "batches", "augment(loader)"))
    monkeypatch.setattr("fulltilt.recorder.stack_sampler.view_of", lambda *_: view)
    recorder.clock, recorder.activity, recorder.previous = clock, Activity.USER, Activity.DATA_WAIT
    recorder.intervals.since_ns = time.perf_counter_ns() + 10**9
    sampler = StackSampler(recorder)
    sampler.take(time.perf_counter_ns(), EARLY_SAMPLE_EVERY_S)
    assert list(sampler.split()[Activity.DATA_WAIT]) == [kind]


@pytest.mark.parametrize(("order", "kind"), [("average, model", "host"), ("model, loss", "torch")])
def test_what_the_loop_computes_before_it_calls_the_model_is_its_own(
    recorder: FakeRecorder, monkeypatch: pytest.MonkeyPatch, order: str, kind: str
) -> None:
    """Without a loader, averaged weights passed for the forward pass; a loss that is a function is part of it."""
    views = {
        "average": StackView("torch", "ema.py:3", "update", None, called_at=("train.py:9", "main", "update(model)")),
        "loss": StackView("torch", "loss.py:3", "dice", None, called_at=("train.py:9", "main", "dice(y, z)")),
        "model": StackView("torch", "train.py:8", "main", "model(x)", in_model=True),
    }
    sampler = StackSampler(recorder)
    recorder.activity, recorder.previous = Activity.USER, Activity.OPTIMIZER
    recorder.intervals.comes_next = Activity.BACKWARD
    for _ in range(CallOrder.ENOUGH):
        recorder.last_switch_ns = time.perf_counter_ns()
        for name in order.split(", "):
            monkeypatch.setattr("fulltilt.recorder.stack_sampler.view_of", lambda *_, view=views[name]: view)
            sampler.take(time.perf_counter_ns(), EARLY_SAMPLE_EVERY_S)
    recorder.intervals.since_ns = time.perf_counter_ns()
    weights = sampler.split()[Activity.OPTIMIZER]
    assert set(weights) == {"torch", kind}
    assert weights[kind] == pytest.approx((1 if kind == "host" else 2) * CallOrder.ENOUGH * EARLY_SAMPLE_EVERY_S)


@pytest.mark.parametrize(
    ("seen", "in_model", "comes_next", "kind"),
    [
        ("torch", False, Activity.DATA_WAIT, "host"),
        ("torch", True, Activity.DATA_WAIT, "torch"),
        ("torch", False, Activity.BACKWARD, "torch"),
        ("torch", False, Activity.CHECKPOINT, "torch"),
        ("data_wait", False, Activity.DATA_WAIT, "host"),
        ("data_wait", False, Activity.BACKWARD, "data_wait"),
    ],
    ids=["a batch next", "in a model", "backward next", "nothing known", "a generator", "a generator of batches"],
)
def test_what_is_done_behind_a_step_is_the_scripts_own_where_a_batch_is_drawn_next(
    recorder: FakeRecorder,
    monkeypatch: pytest.MonkeyPatch,
    seen: str,
    in_model: bool,
    comes_next: Activity,
    kind: str,
) -> None:
    view = StackView(seen, "train.py:7", "follow", "kept.mul_(0.9)", in_model=in_model)
    monkeypatch.setattr("fulltilt.recorder.stack_sampler.view_of", lambda *_: view)
    sampler = StackSampler(recorder)
    recorder.activity, recorder.previous = Activity.USER, Activity.OPTIMIZER
    for _ in range(3):
        sampler.take(time.perf_counter_ns(), EARLY_SAMPLE_EVERY_S)
    assert sampler.split() == (
        {Activity.OPTIMIZER: {seen: pytest.approx(3 * EARLY_SAMPLE_EVERY_S)}} if in_model else {}
    )
    recorder.intervals.since_ns, recorder.intervals.comes_next = time.perf_counter_ns(), comes_next  # it shows only now
    assert list(sampler.split()[Activity.OPTIMIZER]) == [kind]
    assert [told for told, _, _ in recorder.state.lines] == [kind] * 3
