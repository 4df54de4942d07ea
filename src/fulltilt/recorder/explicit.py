"""Recording by hand: ``with fulltilt.record("runs/a") as rec`` for those who would rather write it than attach.

The same recorder as under `fulltilt run`; inside a notebook the report appears below the cell.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from fulltilt import store
from fulltilt.probes.gpu import Gpus
from fulltilt.probes.host import HostProbe
from fulltilt.probes.sampler import Sampler
from fulltilt.recorder import attach
from fulltilt.recorder.loop_marks import LoopMarks
from fulltilt.recorder.run_files import Ended, RunFiles, ending_of, job_root
from fulltilt.recorder.session import Session
from fulltilt.records import Sample, Settings


class Recording(LoopMarks):
    """A run being recorded. Use it in a ``with`` block, or call ``start`` and ``stop`` in different notebook cells.

    ``on_sample`` is told, from another thread, what the machine does about once a second.
    """

    def __init__(
        self, folder: str | Path, name: str | None = None, on_sample: Callable[[Sample], None] | None = None
    ) -> None:
        super().__init__()
        self.folder = Path(folder)
        self._name = name or self.folder.name
        self._attached = False
        self._on_sample = on_sample
        self._files: RunFiles | None = None
        self._sampler: Sampler | None = None

    # ------------------------------------------------------------------ from start to stop

    def start(self, asked: Settings | None = None) -> Recording:
        """Begin to record. Under `fulltilt run` the job is recorded already: then this joins that run.

        ``asked``: the settings that the job was told, where the command line does not show them.
        """
        import torch

        if attach.current is not None:
            self._session, self._attached = attach.current, True
            self.folder = attach.current.recorder.folder
            return self
        t0_ns = time.perf_counter_ns()
        gpus = Gpus.open(root_pid=job_root())
        self._files = RunFiles(self.folder, self._name, t0_ns, gpus, asked)
        if self._files.aside is not None:
            print(f"fulltilt: {self.folder} held a run already; it is now in {self._files.aside}", file=sys.stderr)
        self._sampler = Sampler(self._take, gpus=gpus, host=HostProbe(os.getpid()), t0=t0_ns * 1e-9)
        self._sampler.start()
        self._session = Session(torch, self.folder, t0_ns)
        self._session.begin_here()
        self._session.patches.exits.write_record = self._write_record
        atexit.register(self._stop_with_process)
        return self

    def _take(self, sample: Sample) -> None:
        if self._files is not None:
            self._files.take(sample)
        if self._on_sample is not None:
            self._on_sample(sample)

    def stop(self, failed: bool = False, *, interrupted: bool = False, error: BaseException | None = None) -> None:
        """End the recording and write its report. ``error`` is what ended the loop, where it is known.

        In a notebook the report is shown.
        """
        if error is not None:
            self._stop(*ending_of(error))
        else:
            self._stop("crashed" if failed else "interrupted" if interrupted else "done")

    def _stop(self, state: Ended, exit_code: int | None = None, ended_by: str | None = None) -> None:
        session, self._session = self._session, None
        atexit.unregister(self._stop_with_process)
        if session is None or self._attached or self._files is None:
            return
        if os.getpid() != session.recorder.pid:
            return  # a forked child came to its end: the run is its parent's
        session.finish()
        if self._sampler is not None:
            self._sampler.stop()
        self._files.close(state, exit_code, ended_by)
        _show(self.folder)

    def _write_record(self, status: int) -> None:
        """The process is about to leave at once: there is time to write the record, but not to explain it."""
        if self._session is not None and self._files is not None:
            self._session.recorder.finish()
            self._files.close("killed" if status < 0 else "crashed" if status else "done", status)

    def _stop_with_process(self) -> None:
        """The script has come to its end and never called ``stop``."""
        self._stop(*ending_of(getattr(sys, "last_value", None)))

    def __enter__(self) -> Recording:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop(*ending_of(error))


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
