"""The folders of a job's tasks, made side by side and read as one run."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fulltilt import store
from fulltilt.diagnosis import answer
from fulltilt.errors import NotARunFolder, UsageError
from fulltilt.records import Buckets, RankRecord, RunRecord, Span, Task
from tests.diagnosis.examples import machine

STEP_S = 0.1


def write_task(
    out: Path,
    number: int,
    ranks: tuple[int, ...],
    *,
    host: str | None = None,
    began: str = "2026-01-01T10:00:00+00:00",
    startup_s: float = 5.0,
    group: str | None = "g",
    world: int = 4,
    steps: int = 20,
    state: Any = "done",
    job: str = "j",
    part: int = 0,
    t0_s: float = 0.0,
    folder: Path | None = None,
) -> Path:
    """A task whose ranks begin after some seconds of their own clock, and step together from then on."""
    host = host or f"host{number}"
    wall_s = t0_s + startup_s + steps * STEP_S
    if folder is None:
        folder = store.create_task_folder(out, f"{number}-{host}")
    run = RunRecord("train", ("train.py",), began, machine(hostname=host), "1", task=Task(job, number, 2))
    if state != "running":
        run = replace(run, state=state, wall_s=wall_s, exit_code=0 if state == "done" else -15)
    store.write_json(folder / store.RUN_FILE, run)
    for rank in ranks:
        record = RankRecord(
            rank, world, 9_000_000 + rank, host, "cpu", None, t0_s, wall_s, state == "done", steps, steps
        )
        store.write_json(folder / store.rank_file(rank, part), replace(record, group=group))
        writer = store.LineWriter(folder / store.steps_file(rank, part))
        starts = [t0_s + startup_s + step * STEP_S for step in range(steps)]
        writer.write([Span(t0_s, t0_s + startup_s, 0, 0, 0, None, Buckets(startup_s=startup_s))])
        writer.write([Span(t, t + STEP_S, i, 1, 1, 8, Buckets(compute_s=STEP_S)) for i, t in enumerate(starts)])
        writer.close()
    return folder


def test_two_nodes_are_one_run_on_one_axis_of_time(tmp_path: Path) -> None:
    write_task(tmp_path, 0, (0, 1), startup_s=5.0)
    write_task(tmp_path, 1, (2, 3), startup_s=2.0, began="1999-01-01T00:00:00+00:00")  # its clock is wrong
    run = store.load(tmp_path)
    assert [rank.rank for rank in run.ranks] == [0, 1, 2, 3]
    assert run.spans[0][-1].t1_s == pytest.approx(run.spans[3][-1].t1_s)
    assert run.run.wall_s == pytest.approx(7.0)
    assert (run.run.state, run.warnings) == ("done", ())
    diagnosis = answer(run)
    assert diagnosis.ledger.buckets.startup_s == pytest.approx(5.0)
    assert diagnosis.throughput.steps == 20
    assert diagnosis.job is not None
    assert (diagnosis.job.tasks, diagnosis.job.hosts, diagnosis.job.attempts) == (2, ("host0", "host1"), 1)
    assert diagnosis.job.goodput == pytest.approx(2 / 7)


def test_tasks_that_begin_together_never_share_a_folder(tmp_path: Path) -> None:
    out = tmp_path / "job"
    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(lambda _: store.create_task_folder(out, "0-host"), range(64)))
    assert len(set(made)) == 64
    assert all(store.OwnedFolder(folder).path.is_dir() for folder in made)


def test_a_run_that_another_machine_records_is_not_moved(tmp_path: Path) -> None:
    folder = store.create_folder(tmp_path / "run")
    run = RunRecord("train", (), "2026-01-01T10:00:00+00:00", machine(hostname="elsewhere"), "1")
    store.write_json(folder / store.RUN_FILE, run)
    samples = store.LineWriter(folder / store.SAMPLES_FILE)
    with pytest.raises(UsageError, match="elsewhere is recording a run into"):
        store.move_earlier_run(folder)
    os.utime(samples.path, (1, 1))  # it has written nothing for long: it was killed
    assert store.move_earlier_run(folder) == folder / "before-1"


def test_a_lost_node_is_told_as_missing(tmp_path: Path) -> None:
    write_task(tmp_path, 0, (0, 1), state="crashed")
    write_task(tmp_path, 1, (2,), state="running")
    run = store.load(tmp_path)
    assert run.run.state == "crashed"
    assert run.warnings == (
        "no record of rank 3",
        "host1 is missing: the others have ended, but its end was not recorded",
    )
    job = answer(run).job
    assert job is not None
    assert job.missing_ranks == (3,)


def test_a_task_that_never_trained_is_told_with_its_end(tmp_path: Path) -> None:
    write_task(tmp_path, 0, (0, 1), state="killed")
    write_task(tmp_path, 1, (), state="crashed")
    assert store.load(tmp_path).warnings == (
        "no record of rank 2, 3",
        "host1 has trained nothing: crashed (exit code -15)",
    )


def test_a_requeue_is_the_next_attempt_of_the_job(tmp_path: Path) -> None:
    for number, ranks in ((0, (0, 1)), (1, (2, 3))):
        write_task(tmp_path, number, ranks, group="first", state="killed")
        write_task(tmp_path, number, ranks, group="second", began="2026-01-01T10:01:00+00:00", steps=40)
    assert len(list(tmp_path.glob("*-host*"))) == 4
    run = store.load(tmp_path)
    assert answer(run).throughput.steps == 40
    job = answer(run).job
    assert job is not None
    assert (job.attempts, job.elapsed_s) == (2, pytest.approx(69.0))
    assert dict(job.rest)["between attempts"] == pytest.approx(53.0)
    assert job.goodput == pytest.approx(6 / 69)


def test_ranks_numbered_anew_after_a_restart_are_an_attempt(tmp_path: Path) -> None:
    write_task(tmp_path, 0, (0, 1), group="a", state="running")
    folder = write_task(tmp_path, 1, (2, 3), group="a", state="running")
    write_task(tmp_path, 1, (0, 1), group="b", world=2, t0_s=7.0, folder=folder, steps=30)
    run = store.load(tmp_path)
    assert [(rank.rank, rank.hostname, rank.group) for rank in run.ranks] == [(0, "host1", "b"), (1, "host1", "b")]
    assert run.run.wall_s == pytest.approx(8.0)
    assert [len(attempt.ranks) for attempt in run.earlier] == [4]


def test_a_restart_within_the_tasks_is_an_attempt_though_they_ended_well(tmp_path: Path) -> None:
    for number, ranks in ((0, (0, 1)), (1, (2, 3))):
        folder = write_task(tmp_path, number, ranks, group="a")
        write_task(tmp_path, number, ranks, group="b", t0_s=7.0, folder=folder, part=1, steps=30)
    run = store.load(tmp_path)
    assert [rank.group for rank in run.ranks] == ["b"] * 4
    assert [len(attempt.ranks) for attempt in run.earlier] == [4]
    job = answer(run).job
    assert job is not None
    assert (job.attempts, job.elapsed_s) == (2, pytest.approx(7 + 8))
    assert job.goodput == pytest.approx(5 / 15)


def test_a_run_after_one_that_ended_well_is_another_run(tmp_path: Path) -> None:
    for number, ranks in ((0, (0, 1)), (1, (2, 3))):
        write_task(tmp_path, number, ranks, group="first")
        write_task(tmp_path, number, ranks, group="second", began="2026-01-02T10:00:00+00:00")
    assert store.load(tmp_path).earlier == ()


def test_the_newest_of_two_jobs_in_a_folder_is_read(tmp_path: Path) -> None:
    write_task(tmp_path, 0, (0,), group="old", world=2, job="old")
    write_task(tmp_path, 0, (0, 1), group="new", world=2, job="new", began="2026-01-02T10:00:00+00:00")
    run = store.load(tmp_path)
    assert run.run.task is not None
    assert (run.run.task.job, len(run.ranks)) == ("new", 2)


def test_trainings_apart_from_each_other_are_not_joined(tmp_path: Path) -> None:
    for number in range(2):
        write_task(tmp_path, number, (0,), group=None, world=1)
    with pytest.raises(NotARunFolder, match="2 trainings that were started together but are separate jobs"):
        store.load(tmp_path)


def test_the_folder_of_one_task_is_a_run_by_itself(tmp_path: Path) -> None:
    write_task(tmp_path, 0, (0, 1))
    run = store.load(write_task(tmp_path, 1, (2, 3)))
    assert [rank.rank for rank in run.ranks] == [2, 3]
    assert "no record of rank 0, 1" in run.warnings
