"""Figures and names as people read them."""

import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulltilt.records import FindingCode
from fulltilt.report import wording
from tests.anything import TEXT


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "–"),
        (0.0, "0.00 ms"),
        (0.00031, "0.31 ms"),
        (0.0153, "15.3 ms"),
        (0.4864, "486 ms"),
        (0.9996, "1.00 s"),
        (14.44, "14.4 s"),
        (59.96, "1 min 00 s"),
        (251.2, "4 min 11 s"),
        (3599.6, "1 h 00 min"),
        (11520.0, "3 h 12 min"),
    ],
)
def test_seconds(value, words):
    assert wording.seconds(value) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "–"), (0.0, "0.0 %"), (0.0001, "< 0.1 %"), (0.057, "5.7 %"), (0.583, "58 %"), (1.0, "100 %")],
)
def test_share(value, words):
    assert wording.share(value) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "–"),
        (2.061, "2.06"),
        (99.96, "100"),
        (132.1, "132"),
        (7496.0, "7496"),
        (15_200.0, "15.2 k"),
        (999_700.0, "1.00 M"),
        (3.19e6, "3.19 M"),
        (2.5e9, "2.50 G"),
    ],
)
def test_number(value, words):
    assert wording.number(value) == words


def test_sizes_and_ranges():
    assert wording.size(24 << 30) == "24.0 GiB"
    assert wording.size(800) == "800 B"
    assert wording.percent_range([58.1, None, 61.0]) == "58 to 61 %"
    assert wording.percent_range([58.1, 58.3]) == "58 %"
    assert wording.percent_range([None]) == wording.NOT_MEASURED
    assert wording.speedup((2.6, 3.1)) == "2.6 to 3.1 × as fast"
    assert wording.speedup((1.02, 1.04)) == "1.02 to 1.04 × as fast"
    assert wording.speedup((1.5, 1.5)) == "1.5 × as fast"
    assert wording.speedup(None) is None


def test_every_finding_code_has_a_title():
    assert set(typing.get_args(FindingCode)) <= set(wording.TITLES)


def test_figures_stay_with_their_units():
    assert wording.glued("waits 58 % of 12 ms at line 3 of a.py") == "waits 58\xa0% of 12\xa0ms at line 3 of a.py"


def test_terminal_codes_and_direction_overrides_are_made_visible():
    assert wording.clean("a\x1b[2J\u202eb\tc\udcff") == "a\ufffd[2J\ufffdb c\ufffd"


@given(TEXT | st.text())
def test_clean_text_can_be_written_and_cannot_move_a_cursor(text):
    shown = wording.clean(text)
    shown.encode()
    assert all(c.isprintable() or c in "\n\xa0" for c in shown)
