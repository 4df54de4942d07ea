"""Workers deliver in bursts, and first what they had queued: neither may make a setting look better than it is."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fulltilt.tuning.live.limits import DEFAULT
from fulltilt.tuning.live.measurement import Arrival, Knobs, MeasurementWindow
from fulltilt.tuning.trial.throughput import (
    BlockTimer,
    Patience,
    StepBlock,
    StepSnapshot,
    block_between,
    is_enough,
    rate_of,
    ready_batches,
    wait_share_of,
)
from tests.tuning.simulated_loader import draws

PREFETCH = 2
MOST_STEPS = 3000
# Batches a second: what so many workers make, and what training could take.
JOBS = list(itertools.product((2, 8, 16), (3.0, 7.5, 20.0), (4.0, 14.0)))


def tolerance(workers: int, made: float) -> float:
    """Where a burst takes longer than two seconds, there is time for few of them."""
    return 0.06 if workers / made <= 2.2 else 0.15


def live_rate(workers: int, make_s: float, busy_s: float, head_start_s: float) -> tuple[float, float]:
    """What live tuning sees of a pool that had such a head start: batches a second, and the share waited."""
    now_s = [0.0]
    window = MeasurementWindow(DEFAULT, clock=lambda: now_s[0])
    window.begin(Knobs(workers, PREFETCH), skip=workers * PREFETCH)
    for before, drawn in itertools.pairwise(draws(workers, PREFETCH, make_s, lambda _: busy_s, head_start_s)):
        now_s[0] = drawn.at_s
        arrival = Arrival(drawn.at_s - drawn.asked_s, drawn.asked_s - before.at_s, before.ready - drawn.ready)
        if (seen := window.add(arrival)) is not None:
            return seen.batches_per_s, seen.wait_share
    raise AssertionError("a loader without end")


def study_blocks(
    workers: int, make_s: float, busy_s: float, first_step_s: float, validates: int = 0
) -> list[StepBlock]:
    """What a trial measures. Every ``validates`` steps comes a validation of three seconds."""
    pace, blocks, wait_s, interruptions = BlockTimer(Patience().block_s), [], 0.0, 0

    def busy(number: int) -> float:
        return first_step_s if number == 1 else busy_s + (3.0 if validates and number % validates == 0 else 0.0)

    for number, drawn in enumerate(itertools.islice(draws(workers, PREFETCH, make_s, busy), MOST_STEPS), start=1):
        wait_s += drawn.at_s - drawn.asked_s if number > 1 else 0.0
        interruptions += bool(validates) and number % validates == 1
        # A step ends before what comes between two steps.
        ended_s = drawn.at_s + (first_step_s if number == 1 else busy_s)
        moment = StepSnapshot(
            *(ended_s, number, number, 64 * number, wait_s, interruptions),
            workers=workers,
            queue_batches=workers * PREFETCH,
            ready=drawn.ready,
        )
        if (block := pace.stepped(moment)) is not None:
            blocks.append(block_between(*block))
            if is_enough(blocks, Patience()):
                return blocks
    raise AssertionError("a trial without end")


@pytest.mark.parametrize("head_start_s", [0.0, 2.0, 12.0])
@pytest.mark.parametrize(("workers", "made", "taken"), JOBS)
def test_live_tuning_sees_the_pace_that_a_pool_can_keep(
    workers: int, made: float, taken: float, head_start_s: float
) -> None:
    """A pool begins while the one before still runs dry. Its full queue made 12 workers look 1.58 × as fast."""
    rate, wait_share = live_rate(workers, workers / made, 1 / taken, head_start_s)
    truth = min(made, taken)
    assert rate == pytest.approx(truth, rel=tolerance(workers, made))
    assert wait_share == pytest.approx(1 - truth / taken, abs=tolerance(workers, made))


@pytest.mark.parametrize("first_step_s", [0.1, 10.0])
@pytest.mark.parametrize(("workers", "made", "taken"), JOBS)
def test_a_trial_measures_the_pace_that_the_loader_can_keep(
    workers: int, made: float, taken: float, first_step_s: float
) -> None:
    """During a GPU's first step the workers fill their queue."""
    blocks = study_blocks(workers, workers / made, 1 / taken, first_step_s)
    rate, truth = rate_of(blocks), min(made, taken)
    assert rate is not None
    assert rate.mean == pytest.approx(64 * truth, rel=tolerance(workers, made))
    assert wait_share_of(blocks) == pytest.approx(1 - truth / taken, abs=tolerance(workers, made))


def test_what_queued_up_during_validation_is_not_the_pace_either() -> None:
    rate = rate_of(study_blocks(8, 8 / 7.5, 1 / 14, 0.1, validates=40))
    assert rate is not None
    assert rate.mean == pytest.approx(64 * 7.5, rel=0.1)


def test_what_comes_between_every_few_steps_is_part_of_the_pace() -> None:
    """No block fits between two validations that are five steps apart: a trial would never come to an end."""
    rate = rate_of(study_blocks(2, 2 / 20, 1 / 14, 0.1, validates=5))
    assert rate is not None
    assert rate.mean == pytest.approx(64 * 5 / (3 + 5 / 14), rel=0.2)


def test_a_queue_that_grows_lets_the_training_set_the_pace() -> None:
    blocks: Sequence[StepBlock] = [StepBlock(64, 1.0, from_queue=-32.0)] * 4
    rate = rate_of(blocks)
    assert rate is not None
    assert rate.mean == 64.0
    assert wait_share_of([]) is None


def test_the_batches_that_lie_ready_are_counted() -> None:
    iterator = iter(DataLoader(TensorDataset(torch.arange(20.0)), batch_size=1, num_workers=2))
    deadline_s = time.monotonic() + 60
    while ready_batches(iterator) < 4 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert ready_batches(iterator) == 4
    assert ready_batches(iter(DataLoader(TensorDataset(torch.arange(2.0))))) == 0
