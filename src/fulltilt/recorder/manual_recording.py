"""Recording by hand: ``with fulltilt.record("runs/a") as rec``, instead of `fulltilt run`.

The recorder is the same; inside a notebook the report appears below the cell.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, TypeVar

from fulltilt import __version__, store
from fulltilt.errors import StoppedEarly
from fulltilt.probes.gpu import Gpus
from fulltilt.probes.host import HostProbe
from fulltilt.probes.machine import describe_machine
from fulltilt.probes.sampler import Sampler
from fulltilt.recorder import attach
from fulltilt.recorder.launchers import launched_task, task_name
from fulltilt.recorder.loaders.registry import TimedIterable
from fulltilt.recorder.marks import Activity, EpochBegan, EvalMode, Point
from fulltilt.recorder.recorder import Recorder
from fulltilt.recorder.session import Session
from fulltilt.records import RunRecord, Sample, Settings, Task

Ended = Literal["done", "crashed", "interrupted", "killed"]


class RunFiles:
    """Writes run.json and samples.jsonl: one process of a job does, the first rank's."""

    def __init__(
        self, folder: Path, name: str, t0_ns: int, gpus: Gpus, asked: Settings | None = None, task: Task | None = None
    ) -> None:
        self._t0_ns = t0_ns
        self.task = task
        if task is not None:
            folder = store.create_task_folder(folder, task_name(task, socket.gethostname()))
        else:
            store.create_folder(folder)
        self.folder = folder
        self.aside = store.move_earlier_run(folder)  # where an earlier run in this folder has gone
        self._record = RunRecord(
            name=name,
            command=tuple(sys.argv),
            started_at=datetime.now().astimezone().isoformat(timespec="seconds"),
            machine=describe_machine(gpus),
            fulltilt=__version__,
            asked=asked or Settings(),
            task=task,
        )
        store.write_json(folder / store.RUN_FILE, self._record)
        self._samples = store.LineWriter(folder / store.SAMPLES_FILE)

    def take(self, sample: Sample) -> None:
        """Append what the machine did at one moment."""
        self._samples.write([sample])

    def close(self, state: Ended, exit_code: int | None = None, ended_by: str | None = None) -> None:
        """The run is over. Raises RunFolderError when the disk refuses."""
        self._samples.close()
        wall_s = (time.perf_counter_ns() - self._t0_ns) * 1e-9
        ended = replace(self._record, state=state, wall_s=wall_s, exit_code=exit_code, ended_by=ended_by)
        store.write_json(self.folder / store.RUN_FILE, ended)


def ending_of(error: BaseException | None) -> tuple[Ended, int | None, str | None]:
    """How a run with this error ended: its state, the exit code where known, or else the error's name."""
    if error is None:
        return "done", None, None
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        return ("crashed" if code else "done"), code, None
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", None, None
    if isinstance(error, StoppedEarly):
        return "interrupted", error.exit_code, None
    return "crashed", None, type(error).__name__


def job_root() -> int:
    """The process above the whole job: the launcher, whose children are the other ranks, or this one."""
    return os.getppid() if "LOCAL_RANK" in os.environ else os.getpid()


Item = TypeVar("Item")


class LoopMarks:
    """Marks of a loop. Without a session, and on a thread that does not train, they do nothing."""

    def __init__(self, session: Session | None = None) -> None:
        self._session = session

    def loader(self, batches: Iterable[Item]) -> Iterable[Item]:
        """The same batches, measured. A DataLoader is measured anyway; this also takes any other iterable."""
        import torch

        session = self._session
        if session is None or isinstance(batches, torch.utils.data.DataLoader):
            return batches
        return TimedIterable(session.loaders, batches)

    def validation(self) -> contextlib.AbstractContextManager[None]:
        """What happens inside is evaluation."""
        return _between(self.mark_validation)

    def checkpoint(self) -> contextlib.AbstractContextManager[None]:
        """What happens inside is saving."""
        return _between(self.mark_checkpoint)

    def transfer(self) -> contextlib.AbstractContextManager[None]:
        """What happens inside is the copy of a batch to the GPU; used where Tensor.to cannot be patched."""
        session = self._session
        if session is None or session.recorder.clock is None or session.device.watches_copies:
            return _NOTHING
        return _during(session.recorder, Activity.TRANSFER, Point.TRANSFER)

    def communication(self) -> contextlib.AbstractContextManager[None]:
        """What happens inside is waiting for other ranks."""
        session = self._session
        return _NOTHING if session is None else _during(session.recorder, Activity.COMMUNICATION, Point.NONE)

    def mark_validation(self, on: bool) -> None:
        """Evaluation begins or ends here. Saying so twice does no harm."""
        recorder = self._on_training_thread()
        if recorder is None:
            return
        recorder.evaluation.declare(on)
        if recorder.eval_mode != on:
            recorder.eval_mode = on
            recorder.switch(recorder.activity, EvalMode(on), Point.EVAL)

    def mark_checkpoint(self, on: bool) -> None:
        """Saving begins or ends here. Saying so twice does no harm."""
        recorder = self._on_training_thread()
        if recorder is not None and (recorder.activity is Activity.CHECKPOINT) != on:
            recorder.switch(Activity.CHECKPOINT if on else Activity.USER)

    def mark_epoch(self, number: int) -> None:
        """The epoch with this number begins."""
        recorder = self._on_training_thread()
        if recorder is not None:
            recorder.note(EpochBegan(number))

    def mark_profiling(self, on: bool) -> None:
        """The job runs its own profiler from here on, or no longer: no delays are queued meanwhile."""
        recorder = self._on_training_thread()
        if recorder is not None:
            recorder.profiling = on

    def _on_training_thread(self) -> Recorder | None:
        recorder = self._session.recorder if self._session is not None else None
        if recorder is None or not recorder.on_training_thread():
            return None
        recorder.resume()
        return recorder


_NOTHING = contextlib.nullcontext()


@contextlib.contextmanager
def _between(mark: Callable[[bool], None]) -> Iterator[None]:
    mark(True)
    try:
        yield
    finally:
        mark(False)


@contextlib.contextmanager
def _during(recorder: Recorder, activity: Activity, end: Point) -> Iterator[None]:
    """An activity inside a step. As part of every step, it neither ends a pause nor nests."""
    if not recorder.on_training_thread() or recorder.activity is not Activity.USER:
        yield
        return
    recorder.switch(activity)
    try:
        yield
    finally:
        recorder.switch(Activity.USER, None, end)


class Recording(LoopMarks):
    """A run being recorded. Use it in a ``with`` block, or call ``start`` and ``stop`` in different notebook cells."""

    def __init__(self, folder: str | Path, name: str | None = None, task: Task | None = None) -> None:
        super().__init__()
        self._task = task  # which of several tasks of a job this is, where the launcher's variables do not say
        self.folder = Path(folder)
        self._name = name or self.folder.name
        self._files: RunFiles | None = None
        self._sampler: Sampler | None = None

    under_way: ClassVar[Recording | None] = None  # of this process

    # ------------------------------------------------------------------ from start to stop

    def start(self, asked: Settings | None = None) -> Recording:
        """Begin to record. Under `fulltilt run` the job is recorded already: then this joins that run.

        ``asked``: the job's settings, where the command line does not show them.
        """
        import torch

        if attach.current is not None:
            self._session = attach.current
            self.folder = attach.current.recorder.folder
            return self
        if (earlier := Recording.under_way) is not None:
            earlier.stop()  # a notebook's cell that ended in an exception is run again
        t0_ns = time.perf_counter_ns()
        gpus = Gpus.open(root_pid=job_root())
        # Each rank that a launcher started records by itself: into a folder of its own in this one.
        self._files = RunFiles(self.folder, self._name, t0_ns, gpus, asked, self._task or launched_task((), os.environ))
        if self._files.aside is not None:
            # Ranks that the script itself starts come one after the other, without a launcher's variables.
            whose = "" if multiprocessing.parent_process() is None else ", maybe another rank's of this job"
            held = f"{self.folder} held a run already{whose}"
            print(f"fulltilt: {held}; it is now in {self._files.aside}", file=sys.stderr)
        self._sampler = Sampler(self._files.take, gpus=gpus, host=HostProbe(os.getpid()), t0=t0_ns * 1e-9)
        self._sampler.start()
        self._session = Session(torch, self._files.folder, t0_ns)
        self._session.begin_here()
        atexit.register(self._stop_with_process)
        Recording.under_way = self
        return self

    def stop(self, *, error: BaseException | None = None) -> None:
        """End the recording and write its report, which a notebook shows. ``error`` has ended the loop, if known."""
        self._stop(*ending_of(error))

    def _stop(self, state: Ended, exit_code: int | None, ended_by: str | None) -> None:
        session, self._session = self._session, None
        atexit.unregister(self._stop_with_process)
        if Recording.under_way is self:
            Recording.under_way = None
        if session is None or self._files is None:  # it joined a run that `fulltilt run` records
            return
        if os.getpid() != session.recorder.pid:
            return  # a forked child has ended: the run is its parent's
        session.finish()
        if self._sampler is not None:
            self._sampler.stop()
        self._files.close(state, exit_code, ended_by)
        task = self._files.task
        if task is not None and task.number == 0:
            store.wait_for_tasks(self.folder)
        if task is None or task.number == 0:
            show_report(self.folder)

    def _stop_with_process(self) -> None:
        """The script has ended without a call of ``stop``."""
        self._stop(*ending_of(getattr(sys, "last_value", None)))

    def __enter__(self) -> Recording:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(error=error)


def record(folder: str | Path, name: str | None = None) -> Recording:
    """Record a training loop into a run folder: ``with fulltilt.record("runs/a") as rec: …``."""
    return Recording(folder, name)


def show_report(folder: Path) -> None:
    """Explain the run: the page into the folder, and below the cell where there is one."""
    from fulltilt.report.answer import explain
    from fulltilt.report.terminal import verdict_lines

    _, diagnosis = explain(folder)
    shell = _notebook()
    if shell is None:
        for line in verdict_lines(diagnosis, folder):
            print(line, file=sys.stderr)
        return
    from html import escape

    from IPython.display import HTML, display

    text = (folder / store.REPORT_FILE).read_text(encoding="utf-8")
    style = "width:100%;height:640px;border:0"
    # The div keeps IPython from advising another way of showing frames, which needs a server.
    frame = f'<div><iframe sandbox="allow-scripts" style="{style}" srcdoc="{escape(text)}"></iframe></div>'
    display(HTML(frame))


def _notebook() -> Any:
    """The running notebook's shell, or None in a terminal or script."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell if type(shell).__name__ == "ZMQInteractiveShell" else None
