"""Why a loader worker died, in words: its exit status, the kernel's OOM counter and the room in /dev/shm."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from fulltilt.errors import FulltiltError, MachineError


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the machine says about the moment. None where it does not say."""

    oom_kills: int | None
    shm_free_bytes: int | None


def look() -> Surroundings:
    """The cgroup's count of OOM kills and the free bytes of /dev/shm, now."""
    kills = None
    for path in (Path("/sys/fs/cgroup/memory.events"), Path("/sys/fs/cgroup/memory/memory.oom_control")):
        try:
            match = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
        except OSError:
            continue
        kills = int(match[1]) if match else None
        break
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        free = None
    return Surroundings(kills, free)


def exit_codes(processes: Iterable[BaseProcess]) -> list[int | None]:
    """The exit codes of workers, after a moment in which one that is just dying can end."""
    known = list(processes)
    wait([process.sentinel for process in known], timeout=0.2)
    return [process.exitcode for process in known]


def explain(
    error: BaseException, before: Surroundings, after: Surroundings, exit_codes: Sequence[int | None] = ()
) -> FulltiltError | None:
    """The cause and the fix when ``error`` is torch's word for a dead or starved worker; None for any other error.

    ``exit_codes`` are the workers' own, negative for a signal: torch does not always pass them on.
    """
    text = str(error)
    shm = after.shm_free_bytes

    def died_of(number: signal.Signals) -> bool:
        return f"killed by signal: {signal.strsignal(number)}" in text or -number in exit_codes

    if "shared memory" in text or "bus error" in text.lower() or died_of(signal.SIGBUS):
        room = f" ({shm / 2**20:,.0f} MiB free)" if shm is not None else ""
        return MachineError(
            f"a loader worker ran out of shared memory: /dev/shm is too small{room}",
            "Give the container more (docker run --shm-size=8g), or lower workers or prefetch.",
        )
    told = "DataLoader worker" in text and ("unexpectedly" in text or "killed by signal" in text)
    # What a worker sends is fetched from it: one that dies meanwhile breaks the connection before torch notices.
    cut_off = isinstance(error, OSError | EOFError) and any(exit_codes)
    if not (told or cut_off):
        return None
    if died_of(signal.SIGKILL):
        killed = before.oom_kills is not None and after.oom_kills is not None and after.oom_kills > before.oom_kills
        cause = "the kernel's OOM killer ended it" if killed else "it got SIGKILL, most likely from the OOM killer"
        return MachineError(f"a loader worker died: {cause}", "Lower workers or prefetch, or give the job more memory.")
    if died_of(signal.SIGSEGV):
        return MachineError(
            "a loader worker died of a segmentation fault in native code",
            "Run once with workers: 0 to see which sample or library; do not open HDF5 files before the workers start.",
        )
    return MachineError(
        f"a loader worker died: {(text.strip() or type(error).__name__).splitlines()[0][:160]}",
        "Run once with workers: 0 to see the error itself.",
    )
