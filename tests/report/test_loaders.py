"""Loaders by the line that makes them."""

from dataclasses import replace

import pytest

from fulltilt.diagnosis.loaders import joined_lines
from fulltilt.records import HotLine
from fulltilt.report.run_view import loader_sites, step_picture
from tests.report import examples


def made_anew_each_epoch():
    """The starved run as a script would leave it that makes its loader inside the epoch loop."""
    run, diagnosis = examples.starved()
    rank = run.ranks[0]
    loader, work = rank.loaders[0], rank.workers[0]
    thirds = {"fetch_s": work.fetch_s / 3, "fetch_cpu_s": work.fetch_cpu_s / 3, "cpu_wait_s": work.cpu_wait_s / 3}
    loaders = tuple(
        replace(loader, loader_id=i, passes=1, batches=150, samples=9600, wait_s=loader.wait_s / 3) for i in range(3)
    )
    workers = tuple(replace(work, loader_id=i, processes=2, batches=150, **thirds) for i in range(3))
    return replace(run, ranks=(replace(rank, loaders=loaders, workers=workers),)), diagnosis


def test_loaders_of_one_line_are_one():
    run, _ = made_anew_each_epoch()
    ((loader, (work,)),) = loader_sites(run.ranks[0])
    assert (loader.passes, loader.batches, loader.samples) == (3, 450, 28800)
    assert work.batches == 450
    assert work.fetch_s == pytest.approx(0.94 * 450)


def test_training_and_evaluation_stay_apart_and_unused_ones_are_left_out():
    run, _ = examples.starved()
    train = run.ranks[0].loaders[0]
    others = (replace(train, loader_id=1, role="eval"), replace(train, loader_id=2, where="x.py:1", batches=0))
    sites = loader_sites(replace(run.ranks[0], loaders=(train, *others)))
    assert [loader.role for loader, _ in sites] == ["train", "eval"]


def test_a_step_is_drawn_alike_however_often_the_loader_is_made():
    once, anew = step_picture(*examples.starved()), step_picture(*made_anew_each_epoch())
    assert once is not None
    assert anew is not None
    for part, same in zip(once.lanes[0].parts, anew.lanes[0].parts, strict=True):
        assert (same.kind, same.length_s) == (part.kind, pytest.approx(part.length_s))


def test_batches_that_workers_did_not_report_do_not_shrink_the_picture():
    run, diagnosis = examples.starved()
    work = replace(run.ranks[0].workers[0], batches=225, fetch_s=0.94 * 225, fetch_cpu_s=0.83 * 225, cpu_wait_s=4.5)
    picture = step_picture(replace(run, ranks=(replace(run.ranks[0], workers=(work,)),)), diagnosis)
    assert picture is not None
    assert picture.lanes[0].parts[1].length_s == pytest.approx(0.415)


def test_a_line_seen_twice_is_one_line():
    lines = [HotLine("a.py:1", "f", 1.0, "x()"), HotLine("a.py:2", "f", 2.5), HotLine("a.py:1", "f", 2.0, "x()")]
    assert joined_lines(lines) == (HotLine("a.py:1", "f", 3.0, "x()"), HotLine("a.py:2", "f", 2.5))
