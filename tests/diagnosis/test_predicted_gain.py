"""Predicted gains."""

from fulltilt.diagnosis.predicted_gain import amdahl, by_removing, by_speeding_up, gain


def test_amdahl_and_its_ranges() -> None:
    assert amdahl(0.5) == 2.0
    assert amdahl(1.0) == 100.0
    assert by_removing(0.5, 0.5) == (1.33, 2.0)
    assert by_speeding_up(0.5, 2.0, 4.0) == (1.33, 1.6)
    assert gain(3.0, 5.0, cap=2.0) == (2.0, 2.0)
    assert gain(0.5, 0.8) == (1.0, 1.0)
    assert gain(2.0, 1.5) == (1.5, 1.5)
    assert gain(float("nan"), float("inf")) == (1.0, 100.0)
