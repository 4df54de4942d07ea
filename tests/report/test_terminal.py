"""The report in the terminal: snapshots at 80 and 120 columns, and what holds at any width.

After a wanted change: FULLTILT_UPDATE_SNAPSHOTS=1 pytest tests/report/test_terminal.py
"""

import io
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from fulltilt.report.console import ERRORS, encodable
from fulltilt.report.legend import BUCKET_LEGEND, LegendEntry
from fulltilt.report.run_view import Lane, LanePart, StepPicture, _fetching_title
from fulltilt.report.terminal import ledger_bar, show, step_lines, verdict_lines
from tests.report import examples

SNAPSHOTS = Path(__file__).parent / "snapshots"
ALL = ["starved", "healthy", "cpu_only", "crashed", "straggler", "running", "hostile"]
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def printed(*names: str, width: int = 80, colour: bool = False, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, errors=ERRORS, newline="\n")
    console = Console(
        file=file,
        width=width,
        force_terminal=colour,
        color_system="truecolor" if colour else None,
        highlight=False,
        _environ={},
    )
    show(console, [getattr(examples, name)() for name in names])
    file.flush()
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("names", ["starved", "healthy", "cpu_only", "crashed", "straggler", "starved+healthy"])
def test_snapshot(names, width):
    text = "".join(line.rstrip() + "\n" for line in printed(*names.split("+"), width=width).splitlines())
    path = SNAPSHOTS / f"{names}-{width}.txt"
    if os.environ.get("FULLTILT_UPDATE_SNAPSHOTS"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [*ALL, "starved+healthy"])
@pytest.mark.parametrize("width", [40, 60, 80, 121, 250])
def test_no_line_is_wider_than_the_terminal(name, width):
    lines = printed(*name.split("+"), width=width).splitlines()
    assert max(map(cell_len, lines)) <= width


@pytest.mark.parametrize("name", ALL)
def test_colour_changes_nothing_but_colours_and_patterns(name):
    plain, coloured = printed(name), printed(name, colour=True)
    assert "\x1b[" in coloured
    assert "\x1b" not in plain
    patterns = f"[{re.escape(''.join(entry.pattern for entry in BUCKET_LEGEND.values()))}]"
    assert re.sub(patterns, "█", plain) == re.sub(patterns, "█", ANSI.sub("", coloured))


def test_without_colour_every_bucket_has_a_pattern_of_its_own_also_in_ascii():
    assert len({encodable(entry.pattern, "ascii") for entry in BUCKET_LEGEND.values()}) == len(BUCKET_LEGEND)


@pytest.mark.parametrize("width", [40, 80])
def test_a_tiny_part_of_the_step_stays_on_its_line(width):
    parts = (LanePart("data_wait", 0.0, 0.7), LanePart("queue", 0.7, 1e-4), LanePart("forward", 0.7001, 2e-4))
    lines = step_lines(StepPicture(0.7003, 20, (Lane("Host", parts),)), width, colour=False)
    assert {line.cell_len for line in lines[1:]} == {width - 1}
    assert lines[2].plain.endswith("100 µs")


def test_a_pipe_gets_plain_text():
    file = io.StringIO()
    show(Console(file=file, _environ={}), [examples.starved()])
    assert "\x1b" not in file.getvalue()


def test_an_ascii_terminal_gets_ascii_bars():
    text = printed("starved", encoding="ascii")
    assert ".....##" in text
    assert "->" in text


def test_terminal_codes_and_markup_in_names_are_text():
    text = printed("hostile", width=250)
    assert "\x1b" not in text
    assert "<script>alert(1)</script>\ufffd[2J[bold]&" in text


def test_a_run_without_an_end_says_so():
    assert "no end yet" in printed("running")
    assert "no end yet" not in printed("starved")


def test_the_buckets_are_listed_by_size_without_empty_ones():
    text = printed("starved")
    listed = text[text.index("Where the time went") : text.index("One step")]
    names = ["data wait", "compute", "validation", "start-up", "epoch restart", "transfer", "checkpoint"]
    places = [listed.index(f" {name} ") for name in names]
    assert places == sorted(places)
    assert "communication" not in listed


def test_hot_lines_say_share_function_and_line():
    assert "71 %  in PhotoFolder.__getitem__, dataset.py:48" in printed("starved")


def test_ranks_name_the_slowest_and_what_the_others_wait():
    text = printed("straggler")
    assert "rank 2 is the slowest; the others wait for it up to 22 s" in text
    assert re.search(r"rank 2 .* slowest", text)
    assert re.search(r"rank 0 .* waits 22 s", text)


def test_the_short_form():
    run, diagnosis = examples.starved()
    lines = verdict_lines(diagnosis, run.folder)
    assert lines[0] == diagnosis.verdict.sentence
    short = "  1. Data loading: CPU-bound (58 % of the time after start-up, 2.6 to 3.1 × as fast): raise num_w"
    assert lines[1].startswith(short)
    assert len(lines) == 5
    assert lines[-1] == "  report: fulltilt-runs/20260114-093012-train/report.html"


def test_the_short_form_is_one_line_for_each_thing():
    for name in ALL:
        run, diagnosis = getattr(examples, name)()
        assert not any("\n" in line or "\x1b" in line for line in verdict_lines(diagnosis, run.folder))


@pytest.mark.parametrize("width", [1, 7, 80])
@pytest.mark.parametrize("lengths", [(1, 1, 1), (0.999, 0.0005, 0.0005), (5, 0, 0), (3, 0, 1)])
def test_parts_fill_the_bar_in_proportion(lengths, width):
    entries = [LegendEntry(name, "#000000", "", name) for name in "abc"]
    bar = ledger_bar(list(zip(entries, lengths, strict=True)), width, colour=False).plain
    assert len(bar) == width
    for entry, length in zip(entries, lengths, strict=True):
        assert abs(bar.count(entry.pattern) - length / sum(lengths) * width) <= 1


def test_a_run_that_has_just_begun_has_an_empty_bar():
    assert not ledger_bar([(LegendEntry("a", "#000000", "", "a"), 0.0)], 80, colour=False)


def test_lines_of_loading_without_workers_are_not_said_to_be_theirs():
    staffed = examples.starved()[0].ranks[0]
    alone = replace(staffed, loaders=tuple(replace(loader, num_workers=0) for loader in staffed.loaders))
    assert _fetching_title(staffed) == "In the workers, share of fetching"
    assert _fetching_title(alone) == "Data loading, share of fetching"


def test_a_command_can_be_typed_again_as_it_is_shown():
    run, diagnosis = examples.starved()
    raw = io.StringIO()
    command = ("train.py", "--out", "my runs", "--lr=0.1")
    show(Console(file=raw, width=120, _environ={}), [(replace(run, run=replace(run.run, command=command)), diagnosis)])
    assert "train.py --out 'my runs' --lr=0.1" in raw.getvalue()
