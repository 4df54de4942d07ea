"""`fulltilt run`: runs any script or launcher unchanged, records it and explains it.

Modules that are needed only once the job runs are imported then, so that the job starts sooner.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import typer

from fulltilt import __version__, store
from fulltilt.cli.launched_job import LaunchedJob
from fulltilt.cli.streams import JOB_COMMAND, USAGE_ERROR, StatusBar, complain, tell, tell_wrapped, warn_of_flags
from fulltilt.errors import FulltiltError, UsageError
from fulltilt.probes.cgroup import oom_kills
from fulltilt.probes.gpu import Gpus
from fulltilt.probes.machine import describe_machine
from fulltilt.recorder import attach
from fulltilt.recorder.job_command import job_command, job_name
from fulltilt.recorder.launchers import launched_task, task_name
from fulltilt.recorder.loaders.settings_file import read_settings
from fulltilt.records import RunRecord, Sample, Settings, Task

# Imported in each process of the job once torch is there, not here.
LIVE_TUNING = "fulltilt.tuning.live"
EXACT = "FULLTILT_EXACT"
# After the script they belong to the script. Hardly any has --auto; the others are reported where it refuses them.
RARE_FLAGS = ("--auto",)
OTHER_FLAGS = ("--out", "--deep", "--settings", "--exact")
TICK_S = 1.0
# Up to this many tasks the first one reads at the end what all of them wrote.
MOST_TASKS_AT_THE_END = 64
FATAL = frozenset(
    (signal.SIGHUP, signal.SIGQUIT, signal.SIGABRT, signal.SIGBUS, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)
)

EXAMPLES = (
    "fulltilt run train.py --lr 0.1",
    "fulltilt run -m package.train --lr 0.1",
    "fulltilt run -- torchrun --nproc-per-node 2 train.py",
    "fulltilt run -- accelerate launch train.py",
    "fulltilt run -- /other/env/bin/python train.py",
    "fulltilt run --auto train.py          # tune workers, prefetch, pinning live",
    "fulltilt run --deep 50 train.py       # profile 50 steps with torch.profiler",
    "fulltilt run --settings settings.json train.py",
)
COMMAND = JOB_COMMAND


def run(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCRIPT ARGS | -m MODULE ARGS | PROGRAM ARGS", show_default=False, hidden=True),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Run folder [default: fulltilt-runs/<date>-<script>]")
    ] = None,
    deep: Annotated[
        int, typer.Option(min=0, metavar="N", show_default=False, help="Profile this many steps with torch.profiler.")
    ] = 0,
    settings: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Apply the loader settings of this JSON file.")
    ] = None,
    auto: Annotated[bool, typer.Option("--auto", help="Tune the data loading while the job trains.")] = False,
    exact: Annotated[
        bool, typer.Option("--exact", help="With --auto: tune only where all batches stay bit for bit the same.")
    ] = False,
    module: Annotated[bool, typer.Option("-m", help="Run a module, as python -m does.")] = False,
) -> None:
    """Run a training job unchanged and say why its GPU is idle.

    The script's output, exit code and results stay as they are. The verdict goes to standard error, the
    page is report.html in the run folder. Flags of fulltilt go before the script, the script's own after it.
    """
    if exact and not auto:
        raise UsageError("--exact limits what --auto may change: give both")
    arguments = (["-m"] if module else []) + list(command or [])
    resolved = job_command(arguments)
    asked = read_settings(settings) if settings is not None else Settings()
    name = job_name(arguments)
    task = launched_task(arguments, os.environ)
    folder = run_folder(out, name, task)
    warn_of_flags("run", RARE_FLAGS, arguments)
    # A task's folder is new, so it needs no lock.
    lock = store.OwnedFolder(folder).locked(f"another run is writing into {folder}")
    with contextlib.nullcontext() if task is not None else lock:
        earlier = store.move_earlier_run(folder) if task is None else None
        if earlier is not None:
            tell(f"fulltilt: {folder} held an earlier run; it is now in {earlier}")
        gpus = Gpus.open()
        record = RunRecord(
            name=name,
            command=tuple(arguments),
            started_at=datetime.now().astimezone().isoformat(timespec="seconds"),
            machine=describe_machine(gpus),
            fulltilt=__version__,
            asked=asked,
            task=task,
        )
        live = {attach.ALSO: LIVE_TUNING, **({EXACT: "1"} if exact else {})} if auto else {}
        code = run_job(resolved, folder, record, gpus, settings, deep, live)
    if code == USAGE_ERROR:
        warn_of_flags("run", OTHER_FLAGS, arguments)
    raise typer.Exit(code)


def run_folder(out: Path | None, name: str, task: Task | None = None) -> Path:
    """Create the run folder. A task's lies in the folder of its job, whose name all tasks know."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:60]
    if task is not None:
        out = out or Path("fulltilt-runs") / f"{plain}-{re.sub(r'[^A-Za-z0-9._-]+', '-', task.job)[:60]}"
        return store.create_task_folder(out, task_name(task, socket.gethostname()))
    if out is None:
        return store.create_new_folder(Path("fulltilt-runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{plain}")
    return store.create_folder(out)


def run_job(
    command: list[str],
    folder: Path,
    record: RunRecord,
    gpus: Gpus,
    settings: Path | None,
    deep: int,
    live: dict[str, str],
) -> int:
    """Start the job, watch it and explain it. Returns its exit code, or dies of the signal that ended it."""
    store.write_json(folder / store.RUN_FILE, record)
    killed_before = oom_kills()
    t0_ns = time.perf_counter_ns()
    try:
        variables = attach.environment(folder, t0_ns, settings, deep)
        process = LaunchedJob(command, {**os.environ, **variables, **live})
    except OSError as error:
        raise UsageError(f"cannot start {command[0]}: {error.strerror or error}") from error
    with Monitor(folder, process.pid, t0_ns, gpus, advises=not live) as monitor:
        status = process.wait(monitor.tick)
    wall_s = (time.perf_counter_ns() - t0_ns) * 1e-9
    killed = max((oom_kills() or 0) - killed_before, 0) if killed_before is not None else 0
    end_run(folder, record, wall_s, status, killed, tuned=bool(live))
    return process.leave(status)


class Monitor:
    """Samples the machine into the run folder and shows a status line while the job runs."""

    def __init__(self, folder: Path, pid: int, t0_ns: int, gpus: Gpus, advises: bool = True) -> None:
        self._folder = folder
        from fulltilt.probes.host import HostProbe
        from fulltilt.probes.sampler import Sampler
        from fulltilt.recorder.rank_files import WARN_AFTER_S, SpanFollower

        self._writer: store.LineWriter | None = None
        self._sampler = Sampler(self._take, gpus=gpus, host=HostProbe(pid), t0=t0_ns * 1e-9)
        self._samples: deque[Sample] = deque(maxlen=int(WARN_AFTER_S))
        self._progress = SpanFollower(folder)
        self._bar = StatusBar(sys.stderr)
        self._next_tick_s = 0.0
        self._warned = not advises  # live tuning changes settings itself, and says which

    def _take(self, sample: Sample) -> None:
        self._samples.append(sample)
        if self._writer is None:  # opened here, since the sampler survives a failure
            self._writer = store.LineWriter(self._folder / store.SAMPLES_FILE)
        self._writer.write([sample])

    def __enter__(self) -> Monitor:
        with contextlib.suppress(Exception):  # no thread could be started; the job runs already
            self._sampler.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()
        with contextlib.suppress(Exception):
            self._sampler.stop()
        if self._writer is not None:
            self._writer.close()

    def tick(self) -> None:
        """Called a few times a second; does something once a second."""
        now = time.monotonic()
        if now < self._next_tick_s:
            return
        self._next_tick_s = now + TICK_S
        with contextlib.suppress(Exception):  # the job comes first; a damaged folder is reported at the end
            from fulltilt.report.status_line import host_line, status_line

            self._progress.read()
            self._warn_once()
            if self._bar.on and self._samples:
                last = self._samples[-1]
                machine = status_line(last) if last.gpus else host_line(last)
                self._bar.show(f"fulltilt · {self._progress.words()} · {machine}")

    def _warn_once(self) -> None:
        """Warn while the job runs, once, that it uses little of its GPU."""
        from fulltilt.diagnosis import low_gpu_warning
        from fulltilt.recorder.rank_files import WARN_AFTER_S

        trained = self._progress.recent_buckets(WARN_AFTER_S)
        if self._warned or trained.total_s - trained.startup_s < WARN_AFTER_S:
            return
        self._warned = True
        used = [gpu.util_pct for sample in self._samples for gpu in sample.gpus if gpu.util_pct is not None]
        util_pct = sum(used) / len(used) if used and self._progress.on_gpu else None
        if self._progress.on_gpu and util_pct is None:
            return
        lines = low_gpu_warning(util_pct, trained, lambda: store.load(self._folder))
        if lines:
            self._bar.close()
        for number, line in enumerate(lines):
            tell_wrapped(f"  {line}" if number else f"fulltilt: {line}")


def end_run(
    folder: Path, record: RunRecord, wall_s: float, status: int, oom_kills: int = 0, *, tuned: bool = False
) -> None:
    """Finish the run folder and print the verdict. A problem here never changes how the job ended."""
    try:
        from fulltilt.diagnosis import answer
        from fulltilt.probes.jobs import still_running
        from fulltilt.report.answer import explain
        from fulltilt.report.terminal import verdict_lines

        by_itself, own = ended_by_itself(folder), folder
        state = state_of(status, by_itself)
        ended = replace(record, state=state, wall_s=wall_s, exit_code=status, oom_kills=oom_kills)
        refused: FulltiltError | None = None
        try:
            store.write_json(folder / store.RUN_FILE, ended)
            if record.task is not None:
                if not speaks_for_job(folder, record.task):
                    return
                folder = folder.parent
                if (record.task.count or 0) > MOST_TASKS_AT_THE_END:
                    tell(f"fulltilt: all tasks together: fulltilt report {folder}")
                    return
                store.wait_for_tasks(folder)
            read, diagnosis = explain(folder)
        except FulltiltError as error:  # a full disk or a foreign report.html: the verdict is shown all the same
            read = store.load(folder)
            refused, diagnosis = error, answer(read if record.task is not None else replace(read, run=ended))
        tell()  # the job's last line may have no newline: progress bars leave it open
        for place, line in enumerate(verdict_lines(diagnosis, folder if refused is None else None)):
            tell_wrapped(line, bold=place == 0)
        if refused is not None:
            complain(str(refused))
        if diagnosis.verdict.code == "no_steps" and status == 1 and record.command[0].endswith(".py"):
            # Often a missing module: fulltilt may be installed in another environment than the script needs.
            command = shlex.join(record.command)
            tell_wrapped(f"  it ran with {sys.executable}; for another: fulltilt run -- PYTHON {command}")
        if state == "done" and not by_itself and (pids := still_running(folder)):
            going_on = f"the job goes on in the background (process {', '.join(map(str, pids))})"
            tell(f"fulltilt: {going_on}; once it is done: fulltilt report {folder}")
        if (problem := settings_not_in_force(dict(diagnosis.settings))) is not None:
            tell_wrapped(f"fulltilt: {problem}")
        if dict(diagnosis.settings).get("asked.persistent_workers") and any(
            loader.shuffle and loader.persistent_workers and loader.passes > 1
            for rank in read.ranks
            for loader in rank.loaders
        ):
            tell_wrapped("fulltilt: with workers that persist (--settings) later epochs are shuffled differently")
        if tuned and not any(rank.live or rank.loaders for rank in read.ranks) and diagnosis.verdict.code != "no_steps":
            tell("fulltilt: --auto found nothing to tune: no DataLoader was seen")
        if store.OwnedFolder(own).owns(store.SETTINGS_FILE):
            tell_wrapped(f"  settings found: {own / store.SETTINGS_FILE} (for fulltilt run --settings)")
    except FulltiltError as error:
        complain(str(error))
    except Exception as error:  # our bug must not fail the job
        if os.environ.get("FULLTILT_DEBUG"):
            raise
        what = f"{type(error).__name__}: {error}"
        tell(f"fulltilt: this run could not be explained because of a bug in Fulltilt ({what})")
        tell(f"  its recording: {folder}")


def speaks_for_job(folder: Path, task: Task) -> bool:
    """Whether this task reports on the whole job: the first one does, by its number or by its rank."""
    return task.number == 0 if task.number is not None else 0 in store.read_ranks(folder)


def settings_not_in_force(settings: Mapping[str, object]) -> str | None:
    """Why the workers of `--settings` were not applied, and what to do; None when they were."""
    asked, workers = settings.get("asked.num_workers"), settings.get("num_workers")
    if asked is None or workers in (None, asked) or "live" in settings:
        return None
    where = settings.get("loader")
    return (
        f"--settings was not applied: the training loader at {where} has num_workers={workers}, not {asked}. "
        f'A loader that does not shuffle must be named in the file: "loader": "{where}". '
        "Some libraries take these settings in their own call only"
    )


def ended_by_itself(folder: Path) -> bool:
    """Whether all training processes recorded that they ended by themselves."""
    try:
        ranks = store.read_ranks(folder).values()
    except (FulltiltError, OSError):
        return False  # unknown; reported where the run is explained
    return bool(ranks) and all(rank.finished for rank in ranks)


def state_of(status: int, by_itself: bool = False) -> Literal["done", "crashed", "interrupted", "killed"]:
    """How a job ended, from its exit status and whether the training processes ended by themselves."""
    if status == 0:
        return "done"
    number = -status if status < 0 else status - 128  # a shell reports 128 plus the signal; so may any script
    if number == signal.SIGINT:
        return "interrupted"
    return "killed" if status < 0 or (number in FATAL and not by_itself) else "crashed"
