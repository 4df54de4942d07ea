"""The files of a run that is recorded from within its own process: how it was begun and ended, and the samples."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Literal

from fulltilt import __version__, store
from fulltilt.errors import StoppedEarly
from fulltilt.probes.gpu import Gpus
from fulltilt.probes.machine import describe_machine
from fulltilt.records import RunRecord, Sample, Settings

Ended = Literal["done", "crashed", "interrupted", "killed"]


class RunFiles:
    """Writes run.json and samples.jsonl: one process of a job does, the first rank's."""

    def __init__(self, folder: Path, name: str, t0_ns: int, gpus: Gpus, asked: Settings | None = None) -> None:
        self.folder = folder
        self._t0_ns = t0_ns
        store.create_folder(folder)
        self.aside = store.move_earlier_run(folder)  # where an earlier run in this folder has gone
        self._record = RunRecord(
            name=name,
            command=tuple(sys.argv),
            started_at=datetime.now().astimezone().isoformat(timespec="seconds"),
            machine=describe_machine(gpus),
            fulltilt=__version__,
            asked=asked or Settings(),
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
    """How a run ended that this error left: its state, the exit code where that is known, and else the error's name."""
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
    """The process under which the whole job runs: under a launcher the other ranks are its children, and ours."""
    return os.getppid() if "LOCAL_RANK" in os.environ else os.getpid()
