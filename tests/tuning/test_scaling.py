"""The scaling law finds its own curves again, says how sure it is, and survives a wild point."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fulltilt.tuning.scaling import Measured, fit_scaling


def usl(workers: int, rate: float, sigma: float, peak: float) -> float:
    kappa = (1 - sigma) / peak**2
    return rate * workers / (1 + sigma * (workers - 1) + kappa * workers * (workers - 1))


def test_one_point_is_enough_to_look_upward_from_one_worker() -> None:
    law = fit_scaling([Measured(1, 60.0)], expected_peak=12)
    assert law.best(16) > 4
    one, many = law.at(1), law.at(12)
    assert one.high / one.low < 1.3 < many.high / many.low


def test_the_measured_rates_of_the_cod_job_leave_room_for_its_sharp_peak() -> None:
    """480 images a second at 8 workers lies above every law through the others: 8 must stay worth a try."""
    law = fit_scaling([Measured(4, 265), Measured(16, 394)])
    assert law.at(8).high > 1.05 * 394
    assert 7 <= fit_scaling([Measured(4, 265), Measured(8, 480), Measured(12, 414), Measured(16, 394)]).best(24) <= 12


def test_an_outlier_does_not_carry_the_curve_away() -> None:
    true = [Measured(w, usl(w, 100, 0.02, 8)) for w in (1, 2, 4, 6, 8, 12)]
    wild = [*true, Measured(10, 60.0)]
    assert fit_scaling(wild).at(4).rate == pytest.approx(fit_scaling(true).at(4).rate, rel=0.1)
    assert 5 <= fit_scaling(wild).best(24) <= 10


def test_without_a_usable_point_it_says_so() -> None:
    with pytest.raises(ValueError, match="no rate"):
        fit_scaling([Measured(0, 10.0), Measured(4, 0.0)])


@settings(max_examples=25)
@given(
    sigma=st.floats(0, 0.4),
    peak=st.floats(2, 40),
    rate=st.floats(0.01, 1e5),
    seed=st.integers(0, 1000),
)
def test_the_best_of_a_fit_is_nearly_the_best(sigma: float, peak: float, rate: float, seed: int) -> None:
    noise = Random(seed)
    points = [
        Measured(w, usl(w, rate, sigma, peak) * math.exp(noise.gauss(0, 0.02)), 0.02) for w in (1, 2, 4, 8, 12, 16)
    ]
    law = fit_scaling(points)
    best = max(usl(w, rate, sigma, peak) for w in range(1, 17))
    assert usl(law.best(16), rate, sigma, peak) >= 0.93 * best
    for point in points:
        estimate = law.at(point.workers)
        assert estimate.low < estimate.rate < estimate.high
        assert estimate.rate == pytest.approx(point.rate, rel=0.12)
