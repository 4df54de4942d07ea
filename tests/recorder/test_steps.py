"""Batches are counted when backward has used them up, however far ahead they were drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fulltilt.recorder.intervals import Interval
from fulltilt.recorder.session import Session
from fulltilt.recorder.steps import BurstPlan, StepCounter, plan


def drawn_ahead(counter: StepCounter, batches: int, ahead: int, stop_after: int | None = None) -> int:
    """A pass over loader 0 that keeps ``ahead`` batches in hand; returns how many it trained on."""
    counter.pass_began(0)
    left, held, trained = batches, 0, 0
    while left or held:
        while left and held <= ahead:
            counter.batch(0, 8, evaluating=False)
            left, held = left - 1, held + 1
        if not left:
            counter.pass_ended(0)
        counter.backward()
        held, trained = held - 1, trained + 1
        if trained == stop_after:
            return trained
    return trained


@pytest.mark.parametrize("ahead", [0, 1, 2, 8])
def test_whole_passes_count_every_batch(ahead: int) -> None:
    counter = StepCounter()
    for _ in range(3):
        drawn_ahead(counter, 20, ahead)
    assert counter.take_counts() == (60, 480)


@pytest.mark.parametrize("ahead", [0, 1, 2, 8])
def test_an_early_break_leaves_what_was_drawn_ahead_uncounted(ahead: int) -> None:
    counter = StepCounter()
    drawn_ahead(counter, 20, ahead)
    drawn_ahead(counter, 20, ahead, stop_after=11)
    assert counter.take_counts() == (31, 248)


def test_two_batches_for_each_backward() -> None:
    counter = StepCounter()
    for _ in range(10):
        counter.batch(0, 8, evaluating=False)
        counter.batch(0, 8, evaluating=False)
        counter.backward()
    assert counter.take_counts() == (20, 160)


def test_a_batch_drawn_ahead_is_not_taken_for_part_of_the_first_step() -> None:
    counter = StepCounter()
    drawn_ahead(counter, 20, ahead=1, stop_after=1)
    assert counter.take_counts() == (1, 8)


def test_two_backwards_for_each_batch() -> None:
    counter = StepCounter()
    for _ in range(10):
        counter.batch(0, 8, evaluating=False)
        counter.backward()
        counter.backward()
    assert counter.take_counts() == (10, 80)


def test_all_batches_of_a_pass_drawn_before_its_first_backward() -> None:
    counter = StepCounter()
    counter.pass_began(0)
    for _ in range(5):
        counter.batch(0, 8, evaluating=False)
    assert not counter.pass_ended(0)
    for _ in range(5):
        counter.backward()
    assert counter.take_counts() == (5, 40)
    assert counter.train_loaders == {0}


def test_a_whole_pass_before_the_next_batch_was_an_evaluation() -> None:
    counter = StepCounter()
    for _ in range(2):
        counter.pass_began(1)
        for _ in range(5):
            counter.batch(1, 8, evaluating=False)
        counter.pass_ended(1)
        drawn_ahead(counter, 4, ahead=1)
    assert counter.take_counts() == (8, 64)
    assert counter.train_loaders == {0}


def test_batches_drawn_before_the_model_is_switched_back_train() -> None:
    counter = StepCounter()
    counter.batch(0, 8, evaluating=True, doubtful=True)
    counter.batch(0, 8, evaluating=True, doubtful=True)
    counter.backward()
    counter.backward()
    assert counter.take_counts() == (2, 16)


def test_the_first_batch_of_a_validation_drawn_before_the_switch_does_not() -> None:
    counter = StepCounter()
    for _ in range(3):
        drawn_ahead(counter, 5, ahead=0)
        counter.pass_began(1)
        for place in range(4):
            counter.batch(1, 8, evaluating=place > 0)
        counter.pass_ended(1, evaluating=True)
    assert counter.take_counts() == (15, 120)
    assert counter.train_loaders == {0}


def test_a_few_batches_of_another_loader_in_eval_mode_do_not() -> None:
    counter = StepCounter()
    drawn_ahead(counter, 4, ahead=0)
    counter.batch(1, 8, evaluating=True, doubtful=True)
    drawn_ahead(counter, 4, ahead=0)
    assert counter.take_counts() == (8, 64)
    assert counter.train_loaders == {0}


def test_an_evaluation_right_before_the_last_batch_drawn_ahead_does_not_count() -> None:
    counter = StepCounter()
    counter.pass_began(0)
    for _ in range(3):
        counter.batch(0, 8, evaluating=False)
        counter.batch(0, 8, evaluating=False)
        counter.backward()
        counter.backward()
    counter.batch(0, 8, evaluating=False)
    counter.batch(1, 8, evaluating=True, doubtful=True)
    counter.backward()
    assert counter.take_counts() == (7, 56)
    assert counter.train_loaders == {0}


def test_side_by_side_the_first_loader_counts() -> None:
    counter = StepCounter()
    for _ in range(6):
        counter.batch(0, 8, evaluating=False)
        counter.batch(1, 32, evaluating=False)
        counter.backward()
    assert counter.take_counts() == (6, 48)
    assert counter.train_loaders == {0, 1}
    assert counter.drawn_in_pause({1: (5, 160), 0: (5, 40)}) == (5, 40)
    assert counter.drawn_in_pause({2: (5, 20)}) == (5, 20)


def test_in_nested_loops_the_inner_loader_counts() -> None:
    counter = StepCounter()
    for _ in range(3):
        counter.batch(0, 256, evaluating=False)
        counter.pass_began(1)
        for _ in range(8):
            counter.batch(1, 32, evaluating=False)
            counter.backward()
        counter.pass_ended(1)
    counter.settle()
    assert counter.take_counts() == (24, 768)


@given(
    passes=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    ahead=st.integers(0, 10),
    sizes=st.integers(1, 64),
)
def test_no_batch_is_lost_or_counted_twice(passes: list[int], ahead: int, sizes: int) -> None:
    counter = StepCounter()
    for batches in passes:
        counter.pass_began(0)
        left, held = batches, 0
        while left or held:
            while left and held <= ahead:
                counter.batch(0, sizes, evaluating=False)
                left, held = left - 1, held + 1
            if not left:
                counter.pass_ended(0)
            counter.backward()
            held -= 1
    assert counter.take_counts() == (sum(passes), sum(passes) * sizes)


def test_short_steps_are_measured_in_bursts_where_that_costs_the_job_something() -> None:
    def planned(step_s: float, launch_share: float | None, steps: int = 400) -> BurstPlan | None:
        return plan(steps=steps, calls=2 * steps, step_s=step_s, scaler=False, launch_share=launch_share)

    assert planned(0.0025, None) == BurstPlan(measured_calls=32, counted_calls=400)
    assert planned(0.0025, None, steps=10_000) == BurstPlan(measured_calls=32, counted_calls=1600)
    assert planned(0.006, None) is None
    assert planned(0.00625, launch_share=0.3) == BurstPlan(measured_calls=32, counted_calls=160)
    assert planned(0.0025, launch_share=0.01) == BurstPlan(measured_calls=32, counted_calls=400)
    assert planned(0.006, launch_share=0.01) is None  # the GPU sets the pace: what the host does beside it is free


def test_a_long_step_does_not_end_the_bursts_of_short_ones(tmp_path: Path) -> None:
    observer = (session := Session(torch, tmp_path, 0)).observer
    intervals = session.recorder.intervals
    intervals.steps = intervals.calls = 400

    def plan_after(step_s: float) -> BurstPlan | None:
        intervals.closed[:] = [Interval(0.0, 16 * step_s * 1e9, steps=16)]
        observer._drain()
        return session.recorder.bursts.plan

    assert {plan_after(0.002) for _ in range(3)} == {BurstPlan(measured_calls=16, counted_calls=250)}
    assert plan_after(0.060) is not None  # a validation
    assert plan_after(0.060) is not None
    assert plan_after(0.060) is None  # the steps have become long
