"""The controller against simulated loaders: it comes near the best with few moves, and never decides for ever."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fulltilt.tuning.live.controller import Capacity, Settle, decide, most_workers, pays
from fulltilt.tuning.live.limits import DEFAULT
from fulltilt.tuning.live.measurement import Arrival, Knobs, Measurement, MeasurementWindow, summarize
from tests.tuning.simulated import live_tuning


@settings(max_examples=25, deadline=None)
@given(
    cpus=st.sampled_from([2, 4, 8, 16, 32]),
    peak=st.floats(0.3, 1.5),
    sigma=st.sampled_from([0.0, 0.02, 0.1]),
    demand=st.floats(0.3, 3.0),
    start=st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0, 2.0]),
    seed=st.integers(0, 10_000),
)
def test_it_comes_near_the_best_of_any_scaling_law(
    cpus: int, peak: float, sigma: float, demand: float, start: float, seed: int
) -> None:
    kappa = (1 - sigma) / max(peak * cpus, 1.0) ** 2

    def supply(workers: int) -> float:
        return 10.0 * workers / (1 + sigma * (workers - 1) + kappa * workers * (workers - 1))

    busy_s = 1 / (demand * max(supply(workers) for workers in range(1, cpus + 1)))

    def rate(workers: int) -> float:
        return min(supply(workers), 1 / busy_s) if workers else 1 / (busy_s + 1 / supply(1))

    in_force, moves = live_tuning(rate, busy_s, round(start * cpus), Capacity(cpus), 0.02, seed)
    assert len(moves) <= DEFAULT.most_moves
    assert rate(in_force[-1].num_workers) >= 0.93 * max(rate(workers) for workers in range(cpus + 1))


# Of the job itself, in one window after another.
PACES: dict[str, Callable[[int], float]] = {
    "steady": lambda _: 1.0,
    "slows down": lambda window: 0.93**window,
    "speeds up": lambda window: 1.07**window,
    **{f"halves in window {at}": lambda window, at=at: 1.0 if window < at else 0.5 for at in (1, 2, 3, 4)},  # type: ignore[misc]
    **{f"jumps within window {at}": lambda window, at=at: 1 + 0.8 * min(max(window - at + 0.5, 0), 1) for at in (1, 2)},  # type: ignore[misc]
}


@pytest.mark.parametrize("pace", sorted(PACES))
@pytest.mark.parametrize(("gain", "found"), [(2.5, True), (1.0, False), (0.6, False)])
def test_a_jobs_own_change_of_pace_is_not_taken_for_a_settings_gain(pace: str, gain: float, found: bool) -> None:
    def rate(workers: int) -> float:
        return 2.0 * min(workers, 2) * (gain if workers > 2 else 1.0)

    in_force, moves = live_tuning(rate, 0.05, 2, Capacity(4), 0.004, 0, PACES[pace])
    assert moves
    assert in_force[-1].num_workers > 2 if found else in_force[-1] == Knobs(2)


def test_what_a_trial_gained_is_told_only_where_the_job_changed_by_less() -> None:
    def verdict(before: float, trial: float, again: float) -> bool | None:
        return pays(
            *(
                Measurement(Knobs(2 + (place == 1)), rate, 0.02, 0.5, 0.1)
                for place, rate in enumerate((before, trial, again))
            )
        )

    assert verdict(10, 12, 10) is True
    assert verdict(10, 10.1, 10) is False
    assert verdict(10, 13, 8.5) is True
    assert verdict(10, 11, 8) is None, "faster than both, and by less than the job itself became slower"
    assert verdict(10, 9, 7) is None
    assert verdict(10, 6, 7) is False
    assert verdict(7, 9, 10) is None
    assert verdict(7, 6, 10) is False


def test_a_gain_within_the_scatter_of_its_windows_is_not_kept() -> None:
    def verdict(trial: float, spread: float) -> bool | None:
        seen = (Measurement(Knobs(2), 29.8, 0.012, 0.97, 0.001), Measurement(Knobs(3), trial, spread, 0.97, 0.001))
        return pays(*seen, seen[0]._replace(batches_per_s=30.1))

    assert verdict(30.9, 0.024) is False
    assert verdict(30.9, 0.001) is True
    assert verdict(32.0, 0.024) is True


def test_workers_that_are_all_as_fast_are_left_as_they_are() -> None:
    # They wait for one lock; with windows this uneven one search in fourteen keeps more by chance.
    ends = [live_tuning(lambda _: 30.0, 0.001, 2, Capacity(4), 0.02, seed)[0][-1] for seed in range(200)]
    assert sum(knobs.num_workers > 2 for knobs in ends) <= 20


def test_a_loader_that_is_not_the_limit_is_not_touched() -> None:
    seen = Measurement(Knobs(4), 10.0, 0.01, 0.02, 0.098)
    assert decide((seen,), Capacity(16)) == Settle("the loader is no longer the limit")


def test_what_failed_is_not_tried_again_and_room_is_kept() -> None:
    seen = Measurement(Knobs(0), 1.0, 0.05, 0.9, 0.1)
    failed: tuple[Knobs, ...] = ()
    while not isinstance(move := decide((seen,), Capacity(4), failed), Settle):
        assert move not in failed
        failed = (*failed, move)
    assert 1 <= len(failed) <= 4


def test_a_slower_deep_queue_makes_no_other_number_of_workers_promising() -> None:
    # The CLIP job on an H200 with 16 CPUs: 16 workers were tried after 17, for a promise of 1.6 %.
    rates = {(0, 2): 1.26, (8, 2): 7.55, (12, 2): 10.02, (17, 2): 13.15, (17, 4): 12.85}
    seen = tuple(Measurement(Knobs(*knobs), rate, 0.02, 1 - rate / 16, 1 / 16) for knobs, rate in rates.items())
    assert isinstance(decide(seen, Capacity(16, cpu_share=0.95)), Settle)


def test_a_start_that_was_looked_at_twice_leads_to_workers_too() -> None:
    # A loader made anew in each pass is taken up again before anything was tried.
    seen = (Measurement(Knobs(0), 5.0, 0.05, 0.8, 0.04), Measurement(Knobs(0), 5.2, 0.05, 0.8, 0.04))
    move = decide(seen, Capacity(16))
    assert not isinstance(move, Settle)
    assert move.num_workers > 1


def test_no_number_of_workers_is_tried_that_cannot_beat_having_none() -> None:
    # Cheap samples: handing them over costs more than fetching them.
    seen = (Measurement(Knobs(0), 706.0, 0.02, 0.5, 0.0007), Measurement(Knobs(1), 265.0, 0.02, 0.8, 0.0007))
    assert isinstance(decide(seen, Capacity(2)), Settle)


def test_a_deeper_queue_is_tried_once_where_workers_end() -> None:
    rates = {0: 0.6, 8: 5.0, 12: 7.5, 16: 10.0, 18: 9.5}
    seen = tuple(Measurement(Knobs(workers), rate, 0.02, 1 - rate / 15, 1 / 15) for workers, rate in rates.items())
    assert decide(seen, Capacity(16)) == Knobs(16, 4)
    tried = (*seen, Measurement(Knobs(16, 4), 9.9, 0.02, 0.3, 1 / 15))
    assert isinstance(decide(tried, Capacity(16)), Settle)


@pytest.mark.parametrize(
    ("capacity", "most", "what"),
    [
        (Capacity(16), 16, "CPUs"),
        (Capacity(16, cpu_share=0.5), 32, "CPUs"),
        (Capacity(16, cpu_share=0.01), 64, "CPUs"),
        (Capacity(16, ranks=4, cpu_ranks=4), 4, "CPUs"),
        (Capacity(16, other_workers=10), 6, "CPUs"),
        (Capacity(16, memory_free_bytes=10 << 30, worker_bytes=1 << 30), 6, "memory"),
        (Capacity(16, shm_free_bytes=64 << 20, batch_bytes=4 << 20), 2, "/dev/shm"),
        (Capacity(16, files_left=64, tensors_per_batch=4), 2, "open files"),
        (Capacity(1, memory_free_bytes=1 << 20), 0, "memory"),
    ],
)
def test_the_tightest_limit_counts(capacity: Capacity, most: int, what: str) -> None:
    workers, why = most_workers(capacity, prefetch=2)
    assert workers == most
    assert what in why


# --------------------------------------------------------------------------- windows


def test_a_pause_and_what_queued_up_meanwhile_do_not_count() -> None:
    steady = [Arrival(0.1, 0.1)] * 12
    paused = [*steady, Arrival(0.0, 30.0), *([Arrival(0.0, 0.1)] * 4), *steady]
    seen = summarize(Knobs(2), paused)
    assert seen is not None
    assert seen.batches_per_s == pytest.approx(5.0)
    assert seen.wait_share == pytest.approx(0.5)


def test_a_stretch_in_which_nothing_was_made_has_a_pace_all_the_same() -> None:
    """Others divide by it."""
    seen = summarize(Knobs(2), [Arrival(0.1, 0.1, from_queue=1)] * 8)
    assert seen is not None
    assert 0 < seen.batches_per_s <= 1 / 1.6 + 1e-9


def test_bursts_of_as_many_batches_as_workers_are_no_noise() -> None:
    bursts = [Arrival(0.4, 0.1), Arrival(0.0, 0.1), Arrival(0.0, 0.1), Arrival(0.0, 0.1)] * 6
    seen = summarize(Knobs(4), bursts)
    assert seen is not None
    assert seen.spread == pytest.approx(0.0, abs=1e-9)


def test_a_window_skips_the_beginning_and_ends_when_it_knows_enough() -> None:
    now = [0.0]
    window = MeasurementWindow(DEFAULT, clock=lambda: now[0])
    window.begin(Knobs(2), skip=4)
    answers = []
    for number in range(40):
        now[0] += 0.5
        answers.append(window.add(Arrival(0.0 if number < 4 else 0.3, 0.2)))
    first = next(number for number, seen in enumerate(answers) if seen is not None)
    seen = answers[first]
    assert seen is not None
    assert seen.wait_share == pytest.approx(0.6)
    assert first >= 4 + DEFAULT.least_s / 0.5


def seconds_until_told(rates: Sequence[float], best: float | None, busy_s: float = 0.02) -> float:
    """How long a window looks at a pool of two workers that gives these batches a second, burst by burst."""
    now_s = 0.0
    window = MeasurementWindow(DEFAULT, clock=lambda: now_s)
    window.begin(Knobs(2), 0, best)
    for rate in itertools.cycle(rates):
        for _ in range(2):
            now_s += 1 / rate
            if window.add(Arrival(1 / rate - busy_s, busy_s)) is not None:
                return now_s
    raise AssertionError("a window without end")


@pytest.mark.parametrize("best", [1.0, 4.0, 40.0])
def test_a_window_ends_early_where_a_trial_clearly_pays_or_does_not(best: float) -> None:
    uneven = (8.0, 12.0, 10.0, 7.0, 13.0)
    assert seconds_until_told(uneven, best) < DEFAULT.least_s + 1.0
    assert seconds_until_told(uneven, 10.0) > DEFAULT.least_s + 1.0


def test_a_window_ends_early_where_the_loader_clearly_is_the_limit() -> None:
    uneven = (0.8, 1.3, 1.0, 0.7, 1.2)
    assert seconds_until_told(uneven, None) < seconds_until_told(uneven, None, busy_s=0.7)
