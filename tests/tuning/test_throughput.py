"""How sure a rate is, which losses differ, and memory as a line: pure figures."""

from __future__ import annotations

import math
from random import Random

import pytest

from fulltilt.records import Settings, Trial
from fulltilt.tuning.search_space import fit_line, most_within, vram_line
from fulltilt.tuning.trial.throughput import Patience, StepBlock, is_enough, rate_of, worse_by

# --------------------------------------------------------------------------- rates


def test_a_rate_is_all_samples_over_all_seconds() -> None:
    rate = rate_of([StepBlock(100, 1.0), StepBlock(300, 2.0)])
    assert rate is not None
    assert rate.mean == pytest.approx(400 / 3)
    assert rate.low < rate.mean < rate.high
    assert rate_of([]) is None


def test_one_block_is_not_sure_of_anything() -> None:
    rate = rate_of([StepBlock(100, 1.0)])
    assert rate is not None
    assert (rate.low, math.isinf(rate.high)) == (0.0, True)


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    random = Random(1)
    hits = 0
    for _ in range(400):
        blocks = [StepBlock(round(random.gauss(500, 40)), 1.0) for _ in range(8)]
        rate = rate_of(blocks)
        assert rate is not None
        hits += rate.low <= 500 <= rate.high
    assert 0.91 <= hits / 400 <= 0.985


def test_a_trial_stops_as_soon_as_it_knows_and_not_before() -> None:
    patience = Patience(wanted_error=0.02, least_blocks=5, least_s=1.0, most_s=10.0)
    steady = [StepBlock(100, 0.3)] * 5
    assert not is_enough(steady[:4], patience)
    assert is_enough(steady, patience)
    restless = [StepBlock(50, 0.3), StepBlock(150, 0.3)] * 5
    assert not is_enough(restless, patience)
    assert is_enough(restless * 4, patience)  # its time is over


def test_a_trial_that_cannot_win_any_more_stops_early() -> None:
    restless = [StepBlock(80, 0.3), StepBlock(120, 0.3)] * 5  # 333 samples/s, not known well
    assert not is_enough(restless, Patience(to_beat=300.0))
    assert is_enough(restless, Patience(to_beat=900.0))


# --------------------------------------------------------------------------- losses


def test_the_later_half_of_the_common_steps_is_compared() -> None:
    assert "steps 11 to 20: 9, at the start settings 1" in (worse_by([1.0] * 40, [1.0] * 10 + [9.0] * 10) or "")
    assert worse_by([1.0] * 40, [9.0] * 9) is None


def test_a_setting_that_breaks_training_is_told_from_noise() -> None:
    random = Random(0)
    falling = [2.3 * math.exp(-step / 50) + random.gauss(0, 0.05) for step in range(60)]
    again = [2.3 * math.exp(-step / 50) + random.gauss(0, 0.05) for step in range(60)]
    stuck = [2.3 + random.gauss(0, 0.05) for _ in range(60)]
    assert worse_by(falling, falling) is None
    assert worse_by(falling, again) is None
    assert "mean loss of steps 31 to 60" in (worse_by(falling, stuck) or "")
    assert worse_by(stuck, falling) is None


# --------------------------------------------------------------------------- memory


def test_vram_is_a_line_over_the_batch() -> None:
    trials = [
        Trial(Settings(), "ok", vram_peak_bytes=1000 + 10 * size, in_force=Settings(batch_size=size))
        for size in (8, 16)
    ]
    line = vram_line([*trials, Trial(Settings(), "oom", in_force=Settings(batch_size=999))])
    assert line is not None
    assert (line.intercept, line.slope) == pytest.approx((1000, 10))
    assert most_within(line, 2000) == 100
    assert fit_line([(8, 100), (8, 120)]) is None
