"""Recording by hand: ``with fulltilt.record("runs/a") as rec`` for those who would rather write it than attach.

The same recorder as under `fulltilt run`; inside a notebook the report appears below the cell.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

from fulltilt import __version__, store
from fulltilt.probes.gpu import Gpus
from fulltilt.probes.host import HostProbe
from fulltilt.probes.machine import describe_machine
from fulltilt.probes.sampler import Sampler
from fulltilt.records import RunRecord
from fulltilt.timeline import attach
from fulltilt.timeline.loader_tap import LoaderTap, TappedIterator
from fulltilt.timeline.marks import Activity, EpochBegan, EvalMode, Point
from fulltilt.timeline.recorder import Recorder
from fulltilt.timeline.session import Session
from fulltilt.timeline.stacks import users_line

Item = TypeVar("Item")


class Recording:
    """A run being recorded. Use it in a ``with`` block, or call ``start`` and ``stop`` in different notebook cells."""

    def __init__(self, folder: str | Path, name: str | None = None) -> None:
        self.folder = Path(folder)
        self._name = name or self.folder.name
        self._session: Session | None = None
        self._attached = False
        self._t0_ns = 0
        self._record: RunRecord | None = None
        self._sampler: Sampler | None = None
        self._samples: store.LineWriter | None = None

    # ------------------------------------------------------------------ from start to stop

    def start(self) -> Recording:
        """Begin to record. Under `fulltilt run` the job is recorded already: then this joins that run."""
        import torch

        if attach.current is not None:
            self._session, self._attached = attach.current, True
            self.folder = attach.current.recorder.folder
            return self
        store.create_folder(self.folder)
        store.set_aside(self.folder)
        self._t0_ns = time.perf_counter_ns()
        # Under a launcher the other ranks are its children too: they are ours, not strangers on the GPU.
        gpus = Gpus.open(root_pid=os.getppid() if "LOCAL_RANK" in os.environ else None)
        self._record = RunRecord(
            name=self._name,
            command=tuple(sys.argv),
            started_at=datetime.now().astimezone().isoformat(timespec="seconds"),
            machine=describe_machine(gpus),
            fulltilt=__version__,
        )
        store.write_json(self.folder / store.RUN_FILE, self._record)
        self._samples = store.LineWriter(self.folder / store.SAMPLES_FILE)
        self._sampler = Sampler(
            lambda sample: self._samples.write([sample]) if self._samples else None,
            gpus=gpus,
            host=HostProbe(os.getpid()),
            t0=self._t0_ns * 1e-9,
        )
        self._sampler.start()
        self._session = Session(torch, self.folder, self._t0_ns)
        self._session.recorder.adopt()
        self._session.install()
        self._session.recorder.ensure_started()
        return self

    def stop(self, failed: bool = False) -> None:
        """End the recording and write its report. In a notebook the report is shown."""
        session, self._session = self._session, None
        if session is None or self._attached or self._record is None:
            return
        session.finish()
        if self._sampler is not None:
            self._sampler.stop()
        if self._samples is not None:
            self._samples.close()
        wall_s = (time.perf_counter_ns() - self._t0_ns) * 1e-9
        ended = replace(self._record, state="crashed" if failed else "done", wall_s=wall_s)
        store.write_json(self.folder / store.RUN_FILE, ended)
        _show(self.folder)

    def __enter__(self) -> Recording:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(failed=error is not None)

    # ------------------------------------------------------------------ what the loop tells

    def loader(self, batches: Iterable[Item]) -> Iterable[Item]:
        """The same batches, measured. A DataLoader is measured anyway; this also takes any other iterable."""
        import torch

        session = self._session
        if session is None or isinstance(batches, torch.utils.data.DataLoader):
            return batches
        return TappedIterable(session, batches)

    @contextlib.contextmanager
    def validation(self) -> Iterator[None]:
        """What happens inside is evaluation."""
        self.mark_validation(True)
        try:
            yield
        finally:
            self.mark_validation(False)

    @contextlib.contextmanager
    def checkpoint(self) -> Iterator[None]:
        """What happens inside is saving."""
        self.mark_checkpoint(True)
        try:
            yield
        finally:
            self.mark_checkpoint(False)

    def mark_validation(self, on: bool) -> None:
        """Evaluation begins or ends here. Saying so twice does no harm."""
        recorder = self._on_training_thread()
        if recorder is not None and recorder.eval_mode != on:
            recorder.eval_mode = on
            recorder.switch(recorder.activity, EvalMode(on), Point.EVAL)

    def mark_checkpoint(self, on: bool) -> None:
        """Saving begins or ends here. Saying so twice does no harm."""
        recorder = self._on_training_thread()
        if recorder is not None and (recorder.activity is Activity.SAVE) != on:
            recorder.switch(Activity.SAVE if on else Activity.USER)

    def mark_epoch(self, number: int) -> None:
        """The epoch with this number begins."""
        recorder = self._on_training_thread()
        if recorder is not None:
            recorder.note(EpochBegan(number))

    def _on_training_thread(self) -> Recorder | None:
        recorder = self._session.recorder if self._session is not None else None
        if recorder is None or not recorder.mine():
            return None
        recorder.wake()
        return recorder


class TappedIterable(Generic[Item]):
    """Any iterable of batches with the loader's meter on it."""

    def __init__(self, session: Session, batches: Iterable[Item]) -> None:
        self._taps = session.taps
        self._batches = batches
        where, _ = users_line()
        self._tap = LoaderTap(len(session.taps.all), where, (), weakref.ref(self), plain_description(batches))
        session.taps.all.append(self._tap)

    def __iter__(self) -> Iterator[Item]:
        self._tap.passes += 1
        return TappedIterator(self._taps, self._tap, iter(self._batches))

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def plain_description(batches: Iterable[Any]) -> dict[str, Any]:
    """What is known of an iterable that is no DataLoader: it runs on the training thread."""
    return {
        "dataset": type(batches).__name__,
        "dataset_len": None,
        "iterable": True,
        "batch_size": None,
        "num_workers": 0,
        "prefetch_factor": None,
        "pin_memory": False,
        "persistent_workers": False,
        "drop_last": False,
        "shuffle": None,
        "sampler": None,
        "collate": None,
        "start_method": None,
    }


def record(folder: str | Path, name: str | None = None) -> Recording:
    """Record a training loop into a run folder: ``with fulltilt.record("runs/a") as rec: …``."""
    return Recording(folder, name)


def _show(folder: Path) -> None:
    """Explain the run: the page into the folder, and below the cell where there is one."""
    from fulltilt.report.explain import explain
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
