"""Figures and names read the same everywhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulltilt import figures
from tests.anything import TEXT


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "–"),
        (0.0, "0 s"),
        (0.0000031, "3.1 µs"),
        (0.00031, "310 µs"),
        (0.0153, "15.3 ms"),
        (0.4864, "486 ms"),
        (0.9996, "1 s"),
        (14.44, "14.4 s"),
        (59.96, "1 min"),
        (95, "1 min 35 s"),
        (251.2, "4 min 11 s"),
        (3599.6, "1 h"),
        (11520.0, "3 h 12 min"),
        (-95, "-1 min 35 s"),
    ],
)
def test_seconds(value: float | None, words: str) -> None:
    assert figures.seconds(value) == words


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (None, "–"),
        (0.0, "0 %"),
        (0.0001, "< 0.1 %"),
        (0.057, "5.7 %"),
        (0.0612, "6.1 %"),
        (0.583, "58 %"),
        (1.0, "100 %"),
    ],
)
def test_percent(share: float | None, words: str) -> None:
    assert figures.percent(share) == words
    assert figures.pct(None if share is None else 100 * share) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "–"),
        (0, "0"),
        (0.00012, "1.2e-04"),
        (2.061, "2.06"),
        (3.0, "3"),
        (99.96, "100"),
        (412.4, "412"),
        (7496.0, "7,496"),
        (12_345, "12,345"),
        (999_700.0, "1 M"),
        (3.19e6, "3.19 M"),
        (2.5e9, "2.5 G"),
    ],
)
def test_number(value: float | None, words: str) -> None:
    assert figures.number(value) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "–"),
        (0, "0 B"),
        (800, "800 B"),
        (1000, "1 KiB"),
        (1.5e9, "1.4 GiB"),
        (64 << 20, "64 MiB"),
        (24 << 30, "24 GiB"),
        (1 << 40, "1 TiB"),
    ],
)
def test_size(value: float | None, words: str) -> None:
    assert figures.size(value) == words


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (figures.used_of(int(12.3 * 2**30), 24 << 30), "12.3 of 24 GiB"),
        (figures.whole(1234567), "1,234,567"),
        (figures.count("worker", 1), "1 worker"),
        (figures.count("pass", 3), "3 passes"),
        (figures.count("batch", 12_300), "12,300 batches"),
        (figures.cpus(1.0), "1 CPU"),
        (figures.cpus(1.5), "1.5 CPUs"),
        (figures.times(3.12), "3.1 ×"),
        (figures.times(12.4), "12 ×"),
        (figures.times(1.04), "1.04 ×"),
        (figures.speedup((2.6, 3.1)), "2.6 to 3.1 × as fast"),
        (figures.speedup((1.02, 1.04)), "1.02 to 1.04 × as fast"),
        (figures.speedup((1.0, 1.4)), "up to 1.4 × as fast"),
        (figures.speedup((1.5, 1.5)), "1.5 × as fast"),
        (figures.speedup(None), None),
        (figures.pct_range([58.1, None, 61.0]), "58 to 61 %"),
        (figures.pct_range([58.1, 58.3]), "58 %"),
        (figures.pct_range([None]), "–"),
        (figures.capital("pin the DataLoader"), "Pin the DataLoader"),
        (figures.capital(""), ""),
        (figures.brief("a  long\nname", 6), "a lon…"),
    ],
)
def test_words_around_figures(shown: str | None, expected: str | None) -> None:
    assert shown == expected


def test_terminal_codes_and_direction_overrides_are_made_visible() -> None:
    assert figures.clean("a\x1b[2J\u202eb\tc\udcff") == "a\ufffd[2J\ufffdb c\ufffd"


@given(TEXT | st.text())
def test_clean_text_can_be_written_and_cannot_move_a_cursor(text: str) -> None:
    shown = figures.clean(text)
    shown.encode()
    assert all(c.isprintable() or c in "\n\xa0" for c in shown)
