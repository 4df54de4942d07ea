"""Sentences of the report."""

from fulltilt.report import run_view


def test_figures_stay_with_their_units() -> None:
    assert run_view.glued("waits 58 % of 12 ms at line 3 of a.py") == "waits 58\xa0% of 12\xa0ms at line 3 of a.py"
