import pytest

from fulltilt.diagnosis.gains import amdahl, by_removing, by_speeding_up, gain
from fulltilt.diagnosis.words import capital, count, number, percent, seconds, size, times


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (percent(0.62), "62 %"),
        (percent(0.0612), "6.1 %"),
        (percent(0.0), "0 %"),
        (percent(1.0), "100 %"),
        (number(0), "0"),
        (number(3.14159), "3.14"),
        (number(412.4), "412"),
        (number(12_345), "12,345"),
        (number(0.00012), "1.2e-04"),
        (seconds(0.0123), "12.3 ms"),
        (seconds(0.0000031), "3.1 µs"),
        (seconds(95), "95 s"),
        (seconds(900), "15 min"),
        (seconds(9000), "2.5 h"),
        (size(1_500_000), "1.5 MB"),
        (size(12), "12 B"),
        (size(7.2e12), "7.2 TB"),
        (times(3.12), "3.1 ×"),
        (times(12.4), "12 ×"),
        (count("worker", 1), "1 worker"),
        (count("pass", 3), "3 passes"),
        (count("batch", 2), "2 batches"),
        (capital("pin the DataLoader"), "Pin the DataLoader"),
        (capital(""), ""),
    ],
)
def test_figures_read_as_people_write_them(shown: str, expected: str) -> None:
    assert shown == expected


def test_amdahl_and_its_ranges() -> None:
    assert amdahl(0.5) == 2.0
    assert amdahl(1.0) == 100.0
    assert by_removing(0.5, 0.5) == (1.33, 2.0)
    assert by_speeding_up(0.5, 2.0, 4.0) == (1.33, 1.6)
    assert gain(3.0, 5.0, cap=2.0) == (2.0, 2.0)
    assert gain(0.5, 0.8) == (1.0, 1.0)
    assert gain(2.0, 1.5) == (1.5, 1.5)
    assert gain(float("nan"), float("inf")) == (1.0, 100.0)
