"""One trial from outside: started in isolation, sampled, held to its limits, and ended with all its processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fulltilt import store
from fulltilt.probes.gpu import Gpus
from fulltilt.probes.host import HostProbe
from fulltilt.probes.sampler import Sampler
from fulltilt.recorder import attach
from fulltilt.records import RunRecord, Sample, Settings
from fulltilt.tuning.trial.assignment import ANSWER_FILE, ASSIGNMENT, ASSIGNMENT_FILE, Answer, Assignment
from fulltilt.tuning.trial.isolation import Isolation, kill_below, remove_scratch

OUTPUT_FILE = "output.txt"
LOOK_EVERY_S = 0.05
SAMPLE_EVERY_S = 0.5
# Having answered, a trial has this long to end by itself; other ranks may wait for the one that answered.
LAST_WORDS_S = 5.0
TAIL_BYTES = 8192
# In a command: a folder that is deleted with the trial.
SCRATCH = "{scratch}"
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a trial may use. ``memory_bytes`` counts its whole process tree."""

    time_s: float
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """How a trial's process ended: its exit status, minus its signal. ``tail`` is the end of its output."""

    status: int
    stopped_for: Literal["time", "memory", None]
    wall_s: float
    tail: str
    isolated: bool = False


class TrialProcess:
    """The process of a trial and everything below it, in a scratch folder of its own."""

    def __init__(
        self, isolation: Isolation, command: list[str], assignment: Assignment, caches: Path, t0_ns: int
    ) -> None:
        folder = Path(assignment.folder)
        self._isolation = isolation
        self._caches = caches
        self._shared_before = _shared_memory()
        self.scratch = isolation.scratch()
        if isolation.kind == "landlock":
            assignment = replace(assignment, scratch=str(self.scratch))
        command = [f"{self.scratch}/out" if word == SCRATCH else word for word in command]
        store.write_json(folder / ASSIGNMENT_FILE, assignment)
        try:
            owned = store.OwnedFolder.around(folder / OUTPUT_FILE)
            assert owned is not None
            with os.fdopen(owned.create(folder / OUTPUT_FILE, 0o600), "ab") as output:
                # A session of its own: Ctrl-C reaches the study alone, which then ends its trial.
                self._process = subprocess.Popen(
                    isolation.command(command, self.scratch, folder, caches),
                    env=self._environment(folder, t0_ns),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except BaseException:
            remove_scratch(self.scratch)
            raise
        self.pid = self._process.pid

    def _environment(self, folder: Path, t0_ns: int) -> dict[str, str]:
        variables = {
            **os.environ,
            **attach.environment(folder, t0_ns, None, 0),
            attach.ALSO: "fulltilt.tuning.trial.measure",
            ASSIGNMENT: str((folder / ASSIGNMENT_FILE).resolve()),
            # A trial is no run of the user's: it must not appear in their account.
            "WANDB_MODE": "disabled",
            "PYTHONUNBUFFERED": "1",
        }
        if self._isolation.kind == "landlock":
            (self.scratch / "tmp").mkdir()
            variables["TMPDIR"] = str(self.scratch / "tmp")
        if self._isolation.kind != "none":  # what one trial compiles, the next need not compile again
            for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
                variables[name] = str(self._caches / name.lower())
        return variables

    def poll(self) -> int | None:
        """Its exit status, minus its signal; None while it runs."""
        status = self._process.poll()
        return 128 - status if status is not None and status > 128 else status

    def kill(self) -> None:
        """End it and everything it started, also what has left its session."""
        kill_below(self.pid)
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL) if hasattr(os, "killpg") else self._process.kill()
        self._process.wait()

    def clear(self) -> None:
        """Delete what it wrote, once it has ended."""
        remove_scratch(self.scratch)
        for name, pid in _shared_memory().items():
            if name not in self._shared_before and not Path(f"/proc/{pid}").exists():
                with contextlib.suppress(OSError):
                    (SHARED_MEMORY / name).unlink()


def _shared_memory() -> dict[str, int]:
    """The segments of shared memory that torch made for this user, by the process that made them."""
    found = {}
    with contextlib.suppress(OSError):
        for entry in os.scandir(SHARED_MEMORY):
            if (name := re.match(r"torch_(\d+)_", entry.name)) and entry.stat().st_uid == os.geteuid():
                found[entry.name] = int(name[1])
    return found


def recipe_flags(settings: Settings) -> list[str]:
    """Settings as the flags that all recipes share. A later flag wins over the user's own."""
    values = {
        "--workers": settings.num_workers,
        "--batch-size": settings.batch_size,
        "--accumulation": settings.accumulation,
        "--precision": settings.precision,
    }
    flags = [word for flag, value in values.items() if value is not None for word in (flag, str(value))]
    return [*flags, "--compile"] if settings.compile else flags


def run_trial(
    isolation: Isolation,
    command: list[str],
    assignment: Assignment,
    record: RunRecord,
    limits: Limits,
    gpus: Gpus,
    caches: Path,
    tick: Callable[[float], None] = lambda _: None,
) -> Ended:
    """Run one trial in its folder, which is then a run folder like any other. Ctrl-C ends the trial and is raised.

    ``caches`` is a folder for what torch compiles, which all trials of a study share.
    """
    folder = store.create_folder(Path(assignment.folder))
    store.write_json(folder / store.RUN_FILE, record)
    t0_ns = time.perf_counter_ns()
    process = TrialProcess(isolation, command, assignment, caches, t0_ns)
    held = _HeldMemory(limits.memory_bytes)
    writer = store.LineWriter(folder / store.SAMPLES_FILE)

    def sampled(sample: Sample) -> None:
        writer.write([sample])
        held.add(sample)

    sampler = Sampler(sampled, gpus=gpus, host=HostProbe(process.pid), interval_s=SAMPLE_EVERY_S, t0=t0_ns * 1e-9)
    stopped_for: Literal["time", "memory", None] = None
    answered_at: float | None = None
    try:
        with sampler:
            while (status := process.poll()) is None:
                time.sleep(LOOK_EVERY_S)
                wall_s = (time.perf_counter_ns() - t0_ns) * 1e-9
                tick(wall_s)
                if answered_at is None and has_answered(folder):
                    answered_at = wall_s
                if answered_at is not None and wall_s - answered_at > LAST_WORDS_S:
                    process.kill()
                elif answered_at is None and (held.exceeded or wall_s > limits.time_s):
                    stopped_for = "memory" if held.exceeded else "time"
                    process.kill()
    except BaseException:
        process.kill()
        raise
    finally:
        writer.close()
        process.clear()
    wall_s = (time.perf_counter_ns() - t0_ns) * 1e-9
    state: Literal["done", "crashed", "killed"] = "done" if status == 0 else "killed" if status < 0 else "crashed"
    store.write_json(folder / store.RUN_FILE, replace(record, state=state, wall_s=wall_s, exit_code=status))
    return Ended(status, stopped_for, wall_s, _tail(folder / OUTPUT_FILE), isolation.kind != "none")


def has_answered(folder: Path) -> bool:
    """Whether a trial has measured what it was to measure. One whose script ended before may still be ending it."""
    path = folder / ANSWER_FILE
    return path.exists() and store.read_record(path, Answer).complete


class _HeldMemory:
    """Whether the trial's processes together hold more memory than they may."""

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self.exceeded = False

    def add(self, sample: Sample) -> None:
        held = sample.host.tree_pss_bytes
        if self._limit_bytes is not None and held is not None and held > self._limit_bytes:
            self.exceeded = True


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
