"""Spans: what was warming up counts for nothing but the start-up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fulltilt.recorder.attribution import SpanBuilder, Usual, attribute
from fulltilt.recorder.intervals import Interval
from fulltilt.recorder.marks import Activity, ActivityTimes, Totals
from fulltilt.recorder.rank_state import RankState

S = 1_000_000_000
FORWARD = {Activity.USER: Totals(torch=1.0)}


class StackSampler(SimpleNamespace):
    """The training thread was always seen in torch."""

    backward_held_up = 0.0

    def split(self) -> dict:
        return FORWARD

    def begin_window(self) -> None:
        pass


def step(at_s: float, busy_s: float, starved_s: float) -> Interval:
    times = ActivityTimes(Totals({"gpu_busy": busy_s * S, "launching": starved_s * S}))
    took_ns = (busy_s + starved_s) * S
    return Interval(at_s * S, at_s * S + took_ns, 1, 0, 1, 32, 0, times, took_ns, 0.0, gpu=True)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("steps", [3, 20])
def test_the_first_step_counts_as_one_like_the_next_ones(steps: int, at_once: bool) -> None:
    state = RankState(torch)
    builder = SpanBuilder(0, state, StackSampler())
    intervals = [step(0.0, 1.5, 1.0), *(step(2.5 + 0.04 * number, 0.03, 0.01) for number in range(steps - 1))]
    for batch in [intervals] if at_once else [[interval] for interval in intervals]:
        builder.add(batch)
    spans = builder.take(final=True)

    startup_s = sum(span.buckets.startup_s for span in spans)
    assert startup_s == pytest.approx(2.5 - 0.04, rel=0.01)
    # What the rank says of its steps is what their spans say, so that no rate is above the ceiling made of it.
    assert state.gpu_busy_s == pytest.approx(sum(span.buckets.compute_s for span in spans))
    assert state.launch_s == pytest.approx(sum(span.buckets.host_code_s for span in spans))
    assert state.gpu_steps == steps


def test_what_the_host_does_for_long_in_a_pause_costs_what_the_queue_did_not_cover() -> None:
    usual = Usual()
    for number in range(20):
        attribute(step(0.1 * number, 0.004, 0.001), FORWARD, usual)
    # 100 steps of 4 ms in which the host was away for 0.5 s: the GPU had work for 0.4 s of the 0.6 s.
    times = ActivityTimes(Totals({"paused": 0.1 * S, "long_user": 0.5 * S}))
    paused = Interval(2 * S, 2.6 * S, 100, times=times, gpu=True, in_pause_ns=Totals(user=0.5 * S), counted_steps=100)
    buckets = attribute(paused, FORWARD, usual).buckets
    assert buckets.compute_s == pytest.approx(0.4)
    assert buckets.total_s == pytest.approx(0.6)


def test_what_measuring_closely_took_is_no_part_of_the_time_in_a_pause() -> None:
    usual = Usual()
    for number in range(20):
        measured = step(0.1 * number, 0.004, 0.001)
        measured.times.by_label["observer"] += 0.02 * S
        attribute(measured, FORWARD, usual)
    paused = Interval(
        2 * S, 2.5 * S, 100, times=ActivityTimes(Totals({"paused": 0.5 * S})), gpu=True, counted_steps=100
    )
    buckets = attribute(paused, FORWARD, usual).buckets
    assert buckets.compute_s == pytest.approx(0.4)
    assert buckets.unattributed_s == 0.0


def test_a_generators_time_is_loading_in_the_picture_of_a_step() -> None:
    times = ActivityTimes(Totals(user=1.0 * S), Totals(user=1.0 * S), Totals({Activity.OPTIMIZER: 1.0 * S}))
    made = Interval(0, S, 1, 0, 1, 32, 0, times, S, 0.0)
    seen = {Activity.OPTIMIZER: Totals(torch=1.0, data_wait=6.0, host=3.0)}
    attributed = attribute(made, seen, Usual())
    assert attributed.phases is not None
    assert attributed.phases.load_s == pytest.approx(0.6)
    assert attributed.phases.other_s == pytest.approx(0.3)
    assert attributed.buckets.data_wait_s == pytest.approx(0.6)


def test_a_forward_pass_too_short_for_any_sample_is_compute_and_not_what_was_seen_elsewhere() -> None:
    times = ActivityTimes(
        Totals(user=0.011 * S, backward=0.002 * S),
        user_after=Totals({Activity.DATA_WAIT: 0.001 * S, Activity.OPTIMIZER: 0.01 * S}),
    )
    interval = Interval(0, 0.013 * S, 1, 0, 1, 32, 0, times, 0.013 * S, 0.0, gpu=False)
    buckets = attribute(interval, {Activity.OPTIMIZER: Totals(host=1.0)}, Usual()).buckets
    assert (buckets.host_code_s, buckets.compute_s) == pytest.approx((0.01, 0.003))
