"""A line is shown with the call on it that costs the time."""

from __future__ import annotations

from fulltilt.recorder.stacks.line_times import MOST_LINES, LineGrowth, LineTimes
from fulltilt.records import HotLine


def test_of_several_calls_on_a_line_the_costliest_is_shown_with_what_it_does() -> None:
    """A sleep behind a short wait for a process was said to wait for that one."""
    lines = LineTimes()
    lines.charge("train.py:17", "main", 0.6, "time.sleep(.2)")
    lines.charge("train.py:17", "main", 0.1, "pool.map(work)", waits=True)
    assert lines.top() == (HotLine("train.py:17", "main", 0.7, "time.sleep(.2)", False),)


def test_a_line_tells_what_it_is_mostly_inside_of_whatever_its_calls() -> None:
    lines = LineTimes()
    lines.charge("data.py:9", "read", 0.3, "open(path)")
    lines.charge("data.py:9", "read", 0.2, "load(file)", inside="PIL/ImageFile.py:load")
    lines.charge("data.py:9", "read", 0.2, "crop(file)", inside="PIL/ImageFile.py:load")
    again = LineTimes()
    again.merge(lines.top())
    for one in (lines, again):
        assert one.top() == (HotLine("data.py:9", "read", 0.7, "open(path)", inside="PIL/ImageFile.py:load"),)


def test_the_library_that_a_line_calls_counts_whatever_is_innermost() -> None:
    lines = LineTimes()
    lines.charge("data.py:9", "read", 0.3, "row[columns]")
    for inner, seconds in (("concat", 0.2), ("take", 0.1), ("unique", 0.1)):
        within = f"pandas/series.py:getitem pandas/{inner}.py:{inner}"
        lines.charge("data.py:9", "read", seconds, "row[columns]", inside=within)
    assert lines.top()[0].inside == "pandas/series.py:getitem pandas/concat.py:concat"


def test_a_call_that_was_named_once_stays_named() -> None:
    lines = LineTimes()
    lines.charge("train.py:17", "main", 0.5)
    lines.charge("train.py:17", "main", 0.25, "plot()")
    assert lines.top()[0].call == "plot()"


def test_the_cheaper_half_is_forgotten_when_there_are_too_many_lines() -> None:
    lines = LineTimes()
    for number in range(MOST_LINES):
        lines.charge(f"train.py:{number}", "main", float(number))
    lines.charge("late.py:1", "main", 1e9, "late()")
    assert len(lines.top(2 * MOST_LINES)) == MOST_LINES // 2 + 1
    assert lines.top(1)[0].call == "late()"


def test_the_line_that_grows_is_told_apart_from_a_dear_one() -> None:
    lines = LineTimes()
    growth = LineGrowth(lines)
    for step in range(1, 257):
        lines.charge("a.py:1", "dear", 1.0)
        lines.charge("a.py:2", "grows", 0.01 * step)
        growth.note(step)
    (line,) = growth.top(256)
    assert (line.where, line.function) == ("a.py:2", "grows")
    assert line.seconds > 150
