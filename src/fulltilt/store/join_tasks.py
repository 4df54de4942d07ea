"""A job over several nodes or tasks, read as one run.

    OUT/0-gpu01/, OUT/1-gpu02/, …     a run folder for each task, which alone writes into it
    OUT/0-gpu01.2/                    the same task after a requeue, or of a later job with the same --out

The folders are joined when they are read. The ranks of one process group belong together; those of a restart are the
next attempt. Clocks of two machines are compared only to order attempts: the times of each task are shifted so that the
same step, whose end all ranks wait for, ends at the same time on all of them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import islice, pairwise
from pathlib import Path
from statistics import median

from fulltilt.errors import NotARunFolder, RunFolderError, UsageError
from fulltilt.records import RankRecord, Run, RunRecord, Sample, Span
from fulltilt.store.owned_folder import MARKER
from fulltilt.store.run_folder import (
    RUN_FILE,
    SAMPLES_FILE,
    is_task,
    load_run,
    rank_file,
    rank_parts,
    read_lines,
    read_record,
    steps_file,
    to_the_end,
)

# How many steps align the times of two tasks, and how many samples are kept of a whole job.
ALIGNED_STEPS = 50
MOST_SAMPLES = 20_000
# How many ranks are read of an earlier attempt.
RANKS_OF_EARLIER = 8
# How long to wait for the last lines of the other tasks of a job that has just ended.
PATIENCE_S = 3.0


@dataclass(frozen=True, slots=True)
class Stream:
    """One rank in one attempt: its record, and the file of its spans."""

    task: Path
    record: RankRecord
    part: int

    def spans(self) -> tuple[Span, ...]:
        """The spans as they were written."""
        lines = read_lines(self.task / steps_file(self.record.rank, self.part), Span)
        return to_the_end(self.record, tuple(lines))


def load(folder: str | Path) -> Run:
    """Read the folder of a finished, running or killed job, also of one over several tasks. Raises RunFolderError."""
    folder = Path(folder)
    tasks = tasks_in(folder)
    if not tasks:
        return load_run(folder)
    attempts = _attempts(tasks)
    _refuse_separate_trainings(folder, attempts)
    # After a run that ended well comes another run, even under the same job id.
    runs: list[list[Stream]] = []
    for streams in attempts:
        before = {stream.task for stream in runs[-1]} if runs else set()
        anew = before.isdisjoint(stream.task for stream in streams)  # otherwise a restart within the same tasks
        if before and anew and all(tasks[task].state == "done" for task in before):
            runs.clear()
        runs.append(streams)
    if not runs:
        return _joined(folder, tasks, [], ())
    newest = next((streams for streams in reversed(runs) if any(one.record.steps for one in streams)), runs[-1])
    earlier = []
    for streams, following in pairwise(runs[: runs.index(newest) + 1]):
        run = _joined(folder, tasks, streams[:RANKS_OF_EARLIER], samples=False)
        if not {stream.task for stream in streams}.isdisjoint(stream.task for stream in following):
            # Restarted within its tasks: their end is that of the last attempt.
            run = replace(run, run=replace(run.run, state="crashed", wall_s=None, exit_code=None))
        earlier.append(run)
    return _joined(folder, tasks, newest, tuple(earlier))


def tasks_in(folder: Path) -> dict[Path, RunRecord]:
    """The task folders of the newest job in ``folder``, or that of the task itself; none for a single run."""
    own = None
    with contextlib.suppress(RunFolderError):
        own = read_record(folder / RUN_FILE, RunRecord)
    if own is not None and own.task is not None:
        return {folder: own}
    found: dict[Path, RunRecord] = {}
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            path = Path(entry.path)
            if entry.is_dir(follow_symlinks=False) and (path / MARKER).exists() and (path / RUN_FILE).exists():
                record = read_record(path / RUN_FILE, RunRecord)
                if record.task is not None:
                    found[path] = record
    if not found:
        return {}
    last = max(found.values(), key=lambda record: record.began)
    if own is not None and own.began > last.began:
        return {}
    job = last.task.job if last.task is not None else None
    return {path: record for path, record in found.items() if record.task is not None and record.task.job == job}


def _number(record: RunRecord) -> int:
    return 0 if record.task is None else record.task.number or 0


def run_name(folder: Path) -> str:
    """The name of the run in a folder: the folder's name, for a task with that of the job before it."""
    return f"{folder.parent.name}/{folder.name}" if is_task(folder) else folder.name or str(folder)


def wait_for_tasks(folder: Path) -> None:
    """Wait a moment for the other tasks of a job, which end at about the same time."""
    deadline_s = time.monotonic() + PATIENCE_S
    while any(run.state == "running" for run in tasks_in(folder).values()) and time.monotonic() < deadline_s:
        time.sleep(0.1)


def _attempts(tasks: dict[Path, RunRecord]) -> list[list[Stream]]:
    """The ranks of each attempt, the first attempt first, each rank once."""
    groups: dict[str, dict[int, Stream]] = {}
    began: dict[str, datetime] = {}
    for task, run in tasks.items():
        for rank, part in rank_parts(task):
            record = read_record(task / rank_file(rank, part), RankRecord)
            # A rank that died before its first step is in no group: it belongs to those that started with it.
            started = f"restart {run.task.restart if run.task else 0}{Path(task.name).suffix}.{part}"
            group = record.group or (started if record.world_size > 1 else task.name)
            groups.setdefault(group, {})[rank] = Stream(task, record, part)
            start = run.began + timedelta(seconds=min(record.t0_s, 1e9))
            began[group] = min(began.get(group, start), start)
    ordered = sorted(groups, key=lambda group: began[group])
    return [[groups[group][rank] for rank in sorted(groups[group])] for group in ordered]


def _refuse_separate_trainings(folder: Path, attempts: Sequence[Sequence[Stream]]) -> None:
    alone = {stream.task for streams in attempts for stream in streams if stream.record.world_size == 1}
    numbers = {task.name.partition(".")[0] for task in alone}
    if len(numbers) > 1:
        raise NotARunFolder(
            f"{folder} holds {len(numbers)} trainings that were started together but are separate jobs",
            f"See them side by side: fulltilt report {folder}/*/",
        )


def _joined(
    folder: Path,
    tasks: dict[Path, RunRecord],
    streams: Sequence[Stream],
    earlier: tuple[Run, ...] = (),
    samples: bool = True,
) -> Run:
    """The ranks of one attempt as one run, with their times aligned."""
    spans = [stream.spans() for stream in streams]
    used = list(dict.fromkeys(stream.task for stream in streams)) or list(tasks)
    if samples:  # of the newest attempt, which tasks without a rank belong to
        there = {_number(tasks[task]) for task in used}
        used += [task for task in tasks if not rank_parts(task) and _number(tasks[task]) not in there]
    first: dict[Path, tuple[Span, ...]] = dict.fromkeys(used, ())
    for stream, own in zip(streams, spans, strict=True):
        first[stream.task] = first[stream.task] or own
    origin = {task: own[0].t0_s if own else 0.0 for task, own in first.items()}
    later = _alignment([first[task] for task in used], [origin[task] for task in used])
    shift = {task: late - origin[task] for task, late in zip(used, later, strict=True)}
    records = {task: tasks[task] for task in used}
    hosts: dict[str, Path] = {}  # several tasks may sample one machine
    for task in used:
        hosts.setdefault(tasks[task].machine.hostname, task)
    each = max(MOST_SAMPLES // len(hosts), 1)
    ranks, shifted_spans = [], []
    for stream, own in zip(streams, spans, strict=True):
        by_s, record = shift[stream.task], stream.record
        under_way = _shifted(record.under_way, by_s) if record.under_way is not None else None
        ranks.append(replace(record, t1_s=record.t1_s + by_s, under_way=under_way))
        shifted_spans.append(tuple(_shifted(span, by_s) for span in own))
    return Run(
        folder=str(folder),
        run=_record_of_all(records, origin, shift),
        ranks=tuple(ranks),
        spans=tuple(shifted_spans),
        samples=tuple(_samples(hosts.values(), shift, each)) if samples else (),
        warnings=tuple(_lost(streams, records)),
        tasks=tuple(records.values()),
        earlier=earlier,
    )


def _record_of_all(records: dict[Path, RunRecord], origin: dict[Path, float], shift: dict[Path, float]) -> RunRecord:
    """The record of the job: that of its first task, and how the first of all that failed has ended."""
    leader = min(records, key=lambda task: _number(records[task]))
    first = records[leader]
    failed = next((run for run in records.values() if run.state not in ("done", "running")), None)
    over = all(run.state != "running" for run in records.values())
    ends = [run.wall_s + shift[task] for task, run in records.items() if run.wall_s is not None]
    return replace(
        first,
        started_at=(first.began + timedelta(seconds=origin[leader])).isoformat(timespec="seconds"),
        state=failed.state if failed is not None else "done" if over else "running",
        exit_code=(failed or first).exit_code,
        ended_by=failed.ended_by if failed is not None else None,
        wall_s=max(ends) if over and ends else None,
        oom_kills=sum(run.oom_kills for run in records.values()),
    )


def _alignment(firsts: Sequence[tuple[Span, ...]], origins: Sequence[float]) -> list[float]:
    """How much later each task began than the first one, by the ends of common steps on their clocks."""
    ends = []
    for own, origin_s in zip(firsts, origins, strict=True):
        single = [span for span in own if span.steps == 1][:ALIGNED_STEPS]
        ends.append({span.first_step: span.t1_s - origin_s for span in single})
    common = set.intersection(*(set(own) for own in ends)) if ends else set()
    if not common:
        return [0.0] * len(ends)
    delays = [median(ends[0][step] - own[step] for step in common) for own in ends]
    return [delay - min(delays) for delay in delays]


def _shifted(span: Span, by_s: float) -> Span:
    return replace(span, t0_s=span.t0_s + by_s, t1_s=span.t1_s + by_s) if by_s else span


def _samples(tasks: Iterable[Path], shift: dict[Path, float], most: int) -> Iterable[Sample]:
    """The samples of the machines: every n-th one of a long run."""
    for task in tasks:
        with contextlib.suppress(OSError):
            every = 1 + (task / SAMPLES_FILE).stat().st_size // (most * 500)
            for sample in read_lines(task / SAMPLES_FILE, Sample, every):
                yield replace(sample, t_s=sample.t_s + shift[task])


def _lost(streams: Sequence[Stream], tasks: dict[Path, RunRecord]) -> Iterable[str]:
    """Warnings about ranks without a record, tasks without a folder, and machines without a recorded end."""
    there = {stream.record.rank for stream in streams}
    world = max((stream.record.world_size for stream in streams), default=0)
    if missing := [str(rank) for rank in islice((r for r in range(world) if r not in there), 21)]:
        yield f"no record of rank {', '.join(missing[:20])}{' and more' if len(missing) > 20 else ''}"
    records = tasks.values()
    numbers = {run.task.number for run in records if run.task is not None and run.task.number is not None}
    count = max((run.task.count or 0 for run in records if run.task is not None), default=0)
    if numbers and (absent := [str(n) for n in islice((n for n in range(count) if n not in numbers), 21)]):
        yield f"no folder of task {', '.join(absent[:20])} of {count}{' and more' if len(absent) > 20 else ''}"
    trained = {stream.task for stream in streams}
    for task, run in tasks.items():
        if task not in trained and run.state not in ("running", "done"):
            yield f"{run.machine.hostname} has trained nothing: {run.state} (exit code {run.exit_code})"
    if any(run.state not in ("done", "running") for run in records):
        for run in records:
            if run.state == "running":
                yield f"{run.machine.hostname} is missing: the others have ended, but its end was not recorded"


def newest_run(folder: Path) -> Path:
    """The run in ``folder`` that began or ended last. Raises UsageError where there is none."""
    # The demo's runs are in a folder of their own; the trials of a study are, too, but do not count.
    found = [path for pattern in ("*", "demo/*") for path in folder.glob(f"{pattern}/{RUN_FILE}")]
    written = {path.parent: path.stat().st_mtime for path in found}
    for run in folder.glob("*"):
        for task in tasks_in(run) if run.is_dir() else ():
            written[run] = max(written.get(run, 0.0), (task / RUN_FILE).stat().st_mtime)
    if not written:
        raise UsageError(
            f"which run? There is none in {folder.absolute()}",
            "Name its folder, the one that --out named if you gave one:\nfulltilt report RUN [RUN ...]",
        )
    return max(written, key=lambda run: (written[run], run.name))
