"""Which trial comes next, when a study ends and who wins: on simulated jobs."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from rich.console import Console

from fulltilt.errors import UsageError
from fulltilt.records import Settings, Trial
from fulltilt.tuning.next_trial import next_attempt
from fulltilt.tuning.search_space import (
    ALLOWABLE,
    Space,
    best_of,
    changes_data_set,
    is_loader_only,
    is_made_in_a_loop,
    knee_of,
    parse_allow,
    start_of,
)
from fulltilt.tuning.solutions import Solution, in_words, rate_words, risk_of, show_solutions, verdict
from fulltilt.tuning.study import next_step, time_limit_s
from fulltilt.tuning.verification import Comparison, candidate_of, compare, winner
from tests.tuning.simulated import COD, GIB, Job, study

SIXTEEN = Space(usable_cpus=16)
STARVED = Trial(Settings(), "ok", 100.0, purpose="start", data_wait_share=0.9)


def test_a_job_that_computes_all_the_time_is_left_alone() -> None:
    job = Job({0: 100.0, 32: 5000.0}, 480.0, Settings(num_workers=8, prefetch_factor=2, batch_size=64))
    trials = study(job, SIXTEEN)
    assert [trial.purpose for trial in trials] == ["start"]
    assert winner(trials) is None


def test_workers_of_a_data_set_that_changes_between_epochs_are_not_kept() -> None:
    job = Job({0: 50.0, 1: 100.0, 8: 1000.0, 32: 1000.0}, 300.0, Settings(num_workers=1, prefetch_factor=2))
    trials = study(job, replace(SIXTEEN, may_persist=False))
    assert winner(trials) is not None
    assert not any(trial.settings.persistent_workers for trial in trials)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("x = DataLoader(ds)\nfor e in range(9):\n    ds.set_epoch(e)\n", 3),
        ("x = DataLoader(dataset=a.b)\nwhile True:\n    a.b.level += 1\n", 3),
        ("def on_epoch_start(t):\n    t.loader.dataset.set_epoch(t.epoch)\n", 2),
        # Before the training, not of the data set, or nothing that can be read.
        ("ds.transform = None\nx = DataLoader(ds)\n", None),
        ("x = DataLoader(ds, sampler=s)\nfor e in range(9):\n    s.set_epoch(e)\n    m.lr = 1\n    ds.size()\n", None),
        ("x = DataLoader(ds\n", None),
    ],
)
def test_a_data_set_that_a_script_changes_between_epochs_is_seen(source: str, line: int | None) -> None:
    assert changes_data_set(source) == line


@pytest.mark.parametrize(
    ("source", "line", "expected"),
    [
        ("for epoch in range(3):\n    x = DataLoader(ds)\n    train(x)\n", 2, True),
        ("while epoch < 3:\n    for b in DataLoader(ds):\n        pass\n", 2, True),
        ("x = DataLoader(ds)\nfor epoch in range(3):\n    for b in x:\n        pass\n", 1, False),
        ("x = DataLoader(ds\n", 1, False),
    ],
)
def test_a_loader_made_in_a_loop_is_seen(source: str, line: int, expected: bool) -> None:
    assert is_made_in_a_loop(source, line) is expected


def test_a_solution_says_what_it_changes() -> None:
    trial = Trial(Settings(num_workers=4), "ok", 100.0)
    draws = "random augmentations differ if there are any"
    assert risk_of(Trial(Settings(pin_memory=True), "ok", 100.0)) == "low: the same training"
    assert risk_of(trial) == f"low: {draws}"
    assert risk_of(trial, streams=True) == f"low: the samples of the stream come in another order, {draws}"
    kept = Trial(Settings(num_workers=4, persistent_workers=True), "ok", 100.0)
    assert risk_of(kept) == f"low: {draws}, later epochs are shuffled differently"
    assert in_words(Settings(prefetch_factor=4)) == "prefetch 4"


def test_search_ends_when_the_loader_is_no_longer_the_limit() -> None:
    job = Job({0: 50.0, 1: 100.0, 8: 1000.0, 32: 1000.0}, 300.0, Settings(num_workers=1, prefetch_factor=2))
    trials = study(job, SIXTEEN)
    assert [t.in_force.num_workers for t in trials if t.purpose != "verify"] == [1, 8]
    assert winner(trials) is not None


@given(
    allow=st.sets(st.sampled_from(ALLOWABLE)).filter(lambda names: "accumulation" not in names or "batch" in names),
    states=st.lists(st.sampled_from(["ok", "oom", "crashed", "timed_out", "diverged", "throttled"]), max_size=25),
    workers=st.integers(0, 8),
    rates=st.lists(st.floats(10.0, 5000.0), min_size=25, max_size=25),
    waits=st.lists(st.floats(0.0, 0.99), min_size=25, max_size=25),
)
@examples(max_examples=40)
def test_nothing_is_tried_that_was_not_allowed_and_a_study_always_ends(
    allow: set[str], states: list[str], workers: int, rates: list[float], waits: list[float]
) -> None:
    job = Job(COD, 900.0, Settings(num_workers=workers, prefetch_factor=2, batch_size=64))
    space = Space(4, frozenset(allow))
    trials: list[Trial] = []
    for index in range(60):
        attempt = next_step(trials, space, 10_000.0)
        if attempt is None:
            break
        asked = attempt.settings
        assert asked.batch_size is None or "batch" in allow, "the user's batch size was changed"
        assert asked.accumulation is None or "accumulation" in allow
        assert asked.precision is None or "precision" in allow
        assert asked.compile is None or "compile" in allow
        measured = job.measure(attempt)
        state = states[index] if index < len(states) else "ok"
        rate, wait = rates[index % 25], waits[index % 25]
        trials.append(
            replace(
                measured,
                state=state,  # type: ignore[arg-type]
                samples_per_s=rate if state in ("ok", "throttled") else None,
                samples_per_s_low=0.98 * rate,
                samples_per_s_high=1.02 * rate,
                data_wait_share=wait,
            )
        )
    else:
        pytest.fail("the study does not end")


def test_a_batch_size_is_never_changed_without_being_allowed() -> None:
    job = Job({0: 9000.0, 32: 9000.0}, 400.0, batch_gain=0.5)
    assert all(trial.settings.batch_size is None for trial in study(job, SIXTEEN))
    allowed = study(job, Space(16, frozenset({"batch"})))
    assert any(trial.settings.batch_size for trial in allowed)


def test_the_batch_is_doubled_until_the_knee() -> None:
    job = Job({0: 9000.0, 32: 9000.0}, 400.0, batch_gain=0.06, vram_each=0.001 * GIB)
    trials = study(job, Space(16, frozenset({"batch"})))
    sizes = [t.settings.batch_size for t in trials if t.settings.batch_size and t.purpose == "search"]
    assert sizes[:2] == [128, 256]
    assert sizes[-1] < 64 * 2**6
    knee = knee_of(trials)
    assert knee is not None
    assert knee.settings.batch_size in sizes


def test_the_batch_is_doubled_until_memory_ends_and_the_line_says_how_far() -> None:
    job = Job({0: 9000.0, 32: 9000.0}, 400.0, batch_gain=0.5)  # 4 GiB + 0.1 GiB a sample: 360 samples in 40 GiB
    trials = study(job, Space(16, frozenset({"batch"})))
    sizes = [t.settings.batch_size for t in trials if t.settings.batch_size and t.purpose == "search"]
    assert sizes == [128, 256, 328]
    assert all(trial.state == "ok" for trial in trials)  # the line spared the trial that would not fit


def test_memory_that_ends_before_a_line_is_known_is_a_result() -> None:
    job = Job({0: 9000.0, 32: 9000.0}, 400.0, batch_gain=0.5, vram_total=9.0 * GIB, vram_fixed=0.0, vram_each=0.1 * GIB)
    trials = study(job, Space(16, frozenset({"batch"})))
    assert [t.state for t in trials if t.settings.batch_size] == ["oom"]
    assert winner(trials) is None


def test_a_start_that_does_not_fit_is_tried_in_parts_with_the_same_effective_batch() -> None:
    job = Job({0: 9000.0, 32: 9000.0}, 400.0, vram_each=1.0 * GIB)
    assert [trial.state for trial in study(job, Space(16, frozenset({"batch"})))] == ["oom"]
    trials = study(job, Space(16, frozenset({"batch", "accumulation"})))
    tried = [(t.settings.batch_size, t.settings.accumulation, t.state) for t in trials]
    assert tried == [(None, None, "oom"), (32, 2, "ok")]


def test_a_batch_that_cannot_be_halved_is_tried_in_other_equal_parts() -> None:
    def start(batch_size: int, *others: Trial) -> list[Trial]:
        as_it_is = Trial(Settings(), "oom", purpose="start", in_force=Settings(batch_size=batch_size, num_workers=0))
        return [as_it_is, *others]

    space = Space(16, frozenset({"batch", "accumulation"}))
    first = next_attempt(start(45), space)
    assert first is not None
    assert first.settings == Settings(batch_size=15, accumulation=3)
    second = next_attempt(start(45, Trial(first.settings, "oom")), space)
    assert second is not None
    assert second.settings == Settings(batch_size=5, accumulation=9)


def test_precision_and_compilation_are_tried_on_the_best_when_allowed() -> None:
    job = Job({0: 9000.0, 32: 9000.0}, 400.0)
    trials = study(job, Space(16, frozenset({"precision", "compile"})))
    searched = [trial.settings for trial in trials if trial.purpose == "search"]
    assert searched == [Settings(precision="bf16"), Settings(precision="bf16", compile=True)]
    assert winner(trials) is not None


def test_a_flattered_candidate_is_not_kept() -> None:
    job = Job({0: 100.0, 32: 100.0}, 1000.0)
    trials = study(job, SIXTEEN)
    lucky = Trial(Settings(num_workers=9), "ok", 130.0, 129.0, 131.0, in_force=Settings(num_workers=9), wall_s=10.0)
    while (attempt := next_step([*trials, lucky], SIXTEEN, 1000.0)) is not None:
        trials.append(job.measure(attempt))
    comparison = compare(trials, lucky.settings)
    assert comparison is not None
    assert comparison.decided
    assert winner([*trials, lucky]) is None


@pytest.mark.parametrize(("low", "wins"), [(3.24, True), (1.2, False)])
def test_one_pair_is_enough_only_for_what_no_noise_explains(low: float, wins: bool) -> None:
    """A minute is over after one pair: three times as fast was then called not verified."""
    comparison = Comparison(Settings(num_workers=4), low * 1.1, low, low * 1.2, pairs=1)
    assert comparison.wins is wins
    assert not comparison.decided  # while there is time, a second pair is made


@pytest.mark.parametrize(
    ("low", "high", "pairs", "wins"), [(1.04, 2.45, 2, False), (1.04, 1.5, 2, True), (1.04, 2.45, 3, True)]
)
def test_two_pairs_that_differ_widely_verify_nothing(low: float, high: float, pairs: int, wins: bool) -> None:
    comparison = Comparison(Settings(num_workers=2), 1.5, low, high, pairs)
    assert comparison.wins is wins
    assert comparison.decided is wins


def test_winner_and_start_are_measured_in_turns() -> None:
    trials = study(Job({0: 60.0, 4: 200.0, 8: 400.0, 12: 300.0, 32: 200.0}, 900.0), SIXTEEN)
    order = [trial.settings == Settings() for trial in trials if trial.purpose == "verify"]
    assert order == [True, False] * (len(order) // 2)
    assert len(order) >= 4


def test_each_candidate_is_compared_with_trials_of_the_start_right_before_its_own() -> None:
    def verify(workers: int | None, rate: float) -> Trial:
        return Trial(Settings(num_workers=workers), "ok", rate, 0.99 * rate, 1.01 * rate, purpose="verify")

    slow_hour = [verify(None, 50.0), verify(2, 50.0), verify(None, 50.0), verify(2, 50.0)]
    assert compare([*slow_hour, verify(3, 100.0)], Settings(num_workers=3)) is None
    slowed = replace(verify(3, 90.0), state="throttled")
    assert compare([*slow_hour, verify(None, 50.0), slowed, verify(3, 100.0)], Settings(num_workers=3)) is None
    comparison = compare([*slow_hour, verify(None, 100.0), verify(3, 100.0)], Settings(num_workers=3))
    assert comparison is not None
    assert (comparison.pairs, comparison.ratio) == (1, pytest.approx(1.0))


def test_what_fails_when_it_is_verified_gives_way_to_the_next() -> None:
    best, next_best = Settings(num_workers=4), Settings(num_workers=3)
    trials = [STARVED, Trial(best, "ok", 400.0), Trial(next_best, "ok", 300.0)]
    assert candidate_of(trials) == best
    assert candidate_of([*trials, Trial(best, "throttled", purpose="verify")]) == best
    assert candidate_of([*trials, Trial(best, "crashed", purpose="verify")]) == next_best


def test_with_little_time_only_the_best_of_several_is_verified() -> None:
    close = Job({0: 60.0, 4: 200.0, 8: 400.0, 9: 396.0, 10: 300.0, 12: 300.0, 32: 200.0}, 900.0, noise=0.02)
    for budget_s in (65.0, 75.0, 85.0, 95.0):
        assert winner(study(close, SIXTEEN, budget_s)) is not None, budget_s


def test_a_throttled_start_is_measured_again_and_counts_for_nothing() -> None:
    start = next_step([], SIXTEEN, 600.0)
    assert start is not None
    throttled = Trial(Settings(), "throttled", 400.0, purpose="start", wall_s=5.0)
    assert start_of([throttled]) is None
    again = next_step([throttled], SIXTEEN, 600.0)
    assert again == start
    assert next_step([throttled] * 3, SIXTEEN, 600.0) is None


def test_a_study_taken_up_again_goes_on_as_it_would_have() -> None:
    trials = study(Job(COD, 900.0), SIXTEEN, budget_s=10_000.0)
    for length in range(len(trials)):
        attempt = next_step(trials[:length], SIXTEEN, 10_000.0)
        assert attempt is not None
        assert (attempt.settings, attempt.purpose) == (trials[length].settings, trials[length].purpose)


def test_little_time_is_kept_for_verifying() -> None:
    trials = study(Job(COD, 900.0), SIXTEEN, budget_s=65.0)
    assert [trial.purpose for trial in trials].count("verify") == 4
    assert winner(trials) is not None


@pytest.mark.parametrize("high", [5000.0, float("inf"), None])
def test_a_trial_that_is_sure_of_nothing_verifies_nothing(high: float | None) -> None:
    """Two blocks that differ, or a single one: the interval begins at zero."""
    start = Trial(Settings(), "ok", 700.0, 690.0, 710.0, purpose="verify")
    other = Trial(Settings(num_workers=3), "ok", 1600.0, 0.0, high, purpose="verify")
    comparison = compare([start, other], other.settings)
    assert comparison is not None
    assert not comparison.wins
    assert "inf" not in rate_words(other)


def test_a_busy_machine_is_told() -> None:
    assert "of the CPUs" not in verdict([replace(STARVED, others_share=0.01)])
    assert "up to 60 % of the CPUs" in verdict([STARVED, replace(STARVED, others_share=0.6)])


def test_what_part_of_the_job_was_measured_is_told() -> None:
    slower = Trial(Settings(num_workers=2), "ok", 90.0, steps=41)
    assert "measured only the first 175 steps of the job" in verdict([replace(STARVED, steps=175), slower])
    assert "The trials measured" not in verdict([STARVED])


def test_a_study_that_tried_nothing_says_why() -> None:
    assert "--budget" in verdict([STARVED])
    assert "was stopped" in verdict([STARVED], stopped=True)
    assert "waits for data only 1.0 %" in verdict([replace(STARVED, data_wait_share=0.01)])
    assert verdict([STARVED], streams=True).startswith("Other numbers of workers were not tried: ")
    failed = Trial(Settings(num_workers=1), "crashed", note="address already in use")
    assert "all 2 trials failed (crashed: address already in use)" in verdict([STARVED, failed, failed])
    assert verdict([STARVED, failed, replace(STARVED, purpose="search")]).startswith("Nothing faster was found")


def test_a_solution_that_was_not_verified_is_told_as_such() -> None:
    faster = Trial(Settings(num_workers=2), "ok", 227.0)
    rows = (Solution("Current", STARVED, None, None, "–"), Solution("Solution 1", faster, 2.27, None, "low: the same"))
    for won, says in ((None, True), (Settings(num_workers=4), True), (faster.settings, False)):
        show_solutions(console := Console(file=io.StringIO(), width=100), rows, won)
        assert ("Measured once, not verified." in console.file.getvalue()) is says  # type: ignore[attr-defined]


def test_the_settings_of_a_loader_change_nothing_else() -> None:
    assert all(is_loader_only(trial.settings) for trial in study(Job(COD, 900.0), SIXTEEN))
    best = best_of(study(Job(COD, 900.0), SIXTEEN))
    assert best is not None
    assert best.settings.pin_memory is True  # on a GPU
    assert best.settings.persistent_workers is True


def test_later_trials_may_take_a_few_times_as_long_as_the_start() -> None:
    start = Trial(Settings(), "ok", 100.0, purpose="start", wall_s=10.0)
    assert time_limit_s([], 600.0, None) == 600.0
    assert time_limit_s([start], 600.0, None) == 50.0
    assert time_limit_s([start], 600.0, 7.0) == 7.0
    assert time_limit_s([], 3.0, 7.0) == 3.0
    assert time_limit_s([start], 11.0, None) == 11.0  # one that hangs does not go beyond the budget
    assert time_limit_s([start], 40.0, None) == 40.0


def test_what_is_allowed_is_checked() -> None:
    assert parse_allow("batch, precision") == {"batch", "precision"}
    assert parse_allow("") == frozenset()
    with pytest.raises(UsageError, match="there is no bach"):
        parse_allow("bach")
    with pytest.raises(UsageError, match="--allow batch,accumulation"):
        parse_allow("accumulation")


def test_a_study_that_was_stopped_does_not_say_that_its_time_was_over() -> None:
    faster = Settings(num_workers=4)
    found = [STARVED, Trial(faster, "ok", 130.0)]
    one_pair = [Trial(settings, "ok", 100.0, 90.0, 120.0, purpose="verify") for settings in (Settings(), faster)]
    for trials in (found, [*found, *one_pair]):
        assert "the budget (--budget) ended" in verdict(trials)
        told = verdict(trials, stopped=True)
        assert "was stopped" in told
        assert "time" not in told
