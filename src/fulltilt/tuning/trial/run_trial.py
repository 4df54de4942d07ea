"""Runs one trial: starts it in isolation, samples it, keeps it within its limits, and ends all its processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fulltilt import store
from fulltilt.figures import SIGNALS
from fulltilt.probes.gpu import Gpus
from fulltilt.probes.host import HostProbe
from fulltilt.probes.sampler import Sampler
from fulltilt.recorder import attach
from fulltilt.records import RunRecord, Sample, Settings
from fulltilt.tuning.trial.isolation import Isolation, kill_descendants, remove_scratch
from fulltilt.tuning.trial.throughput import ANSWER_FILE, ASSIGNMENT, ASSIGNMENT_FILE, Answer, Assignment

OUTPUT_FILE = "output.txt"
LOOK_EVERY_S = 0.05
SAMPLE_EVERY_S = 0.5
# After its answer, a trial has this long to end by itself; other ranks may still wait for that one.
EXIT_GRACE_S = 5.0
TAIL_BYTES = 8192
# Placeholder in a command: a folder that is deleted with the trial.
SCRATCH = "{scratch}"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a trial's process ended. ``status`` is its exit code, or minus its signal; ``tail`` the end of its output."""

    status: int
    stopped_for: Literal["time", "memory", None]
    wall_s: float
    tail: str
    isolated: bool = False


def run_trial(
    isolation: Isolation,
    command: list[str],
    assignment: Assignment,
    record: RunRecord,
    time_limit_s: float,
    memory_limit_bytes: int | None,
    gpus: Gpus,
    caches: Path,
    tick: Callable[[float], None] = lambda _: None,
) -> Ended:
    """Run one trial in its folder, which becomes a run folder like any other. Ctrl-C ends the trial and is raised.

    The memory limit is for its whole process tree. All trials of a study share ``caches``, for what torch compiles.
    """
    folder = store.create_folder(Path(assignment.folder))
    store.write_json(folder / store.RUN_FILE, record)
    writer = store.LineWriter(folder / store.SAMPLES_FILE)
    t0_ns = time.perf_counter_ns()
    held_bytes = 0

    def sampled(sample: Sample) -> None:
        nonlocal held_bytes
        writer.write([sample])
        held_bytes = sample.host.tree_pss_bytes or 0

    stopped_for: Literal["time", "memory", None] = None
    answered_at: float | None = None
    scratch = isolation.scratch()
    try:
        process = _start(isolation, command, assignment, scratch, caches, t0_ns)
        try:
            host = HostProbe(process.pid)
            with Sampler(sampled, gpus=gpus, host=host, interval_s=SAMPLE_EVERY_S, t0=t0_ns * 1e-9):
                while process.poll() is None:
                    time.sleep(LOOK_EVERY_S)
                    wall_s = (time.perf_counter_ns() - t0_ns) * 1e-9
                    tick(wall_s)
                    if answered_at is None and _has_answered(folder):
                        answered_at = wall_s
                    if answered_at is not None:
                        if wall_s - answered_at > EXIT_GRACE_S:
                            _kill(process)
                    elif memory_limit_bytes is not None and held_bytes > memory_limit_bytes:
                        stopped_for = "memory"
                        _kill(process)
                    elif wall_s > time_limit_s:
                        stopped_for = "time"
                        _kill(process)
        finally:
            _kill(process)
    finally:
        writer.close()
        remove_scratch(scratch)
    wall_s = (time.perf_counter_ns() - t0_ns) * 1e-9
    code = process.returncode
    status = 128 - code if code - 128 in SIGNALS else code
    state: Literal["done", "crashed", "killed"] = "done" if status == 0 else "killed" if status < 0 else "crashed"
    store.write_json(folder / store.RUN_FILE, replace(record, state=state, wall_s=wall_s, exit_code=status))
    return Ended(status, stopped_for, wall_s, _tail(folder / OUTPUT_FILE), isolation.kind != "none")


def _start(
    isolation: Isolation, command: list[str], assignment: Assignment, scratch: Path, caches: Path, t0_ns: int
) -> subprocess.Popen[bytes]:
    folder = Path(assignment.folder)
    variables = {
        **os.environ,
        **attach.environment(folder, t0_ns, None, 0),
        attach.ALSO: "fulltilt.tuning.trial.measure",
        ASSIGNMENT: str((folder / ASSIGNMENT_FILE).resolve()),
        # A trial must not appear in the user's account.
        "WANDB_MODE": "disabled",
        "PYTHONUNBUFFERED": "1",
    }
    if isolation.kind == "landlock":
        assignment = replace(assignment, scratch=str(scratch))
        (scratch / "tmp").mkdir()
        variables["TMPDIR"] = str(scratch / "tmp")
    if isolation.kind != "none":  # compiled once for all trials
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            variables[name] = str(caches / name.lower())
    store.write_json(folder / ASSIGNMENT_FILE, assignment)
    command = [f"{scratch}/out" if word == SCRATCH else word for word in command]
    owned = store.OwnedFolder.around(folder / OUTPUT_FILE)
    assert owned is not None
    with os.fdopen(owned.create(folder / OUTPUT_FILE, 0o600), "ab") as output:
        # A session of its own: Ctrl-C reaches only the study, which then ends the trial.
        return subprocess.Popen(
            isolation.command(command, scratch, folder, caches, temporary=[caches]),
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a trial and everything it started, also in other sessions."""
    if process.poll() is None:
        kill_descendants(process.pid)
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _has_answered(folder: Path) -> bool:
    """Whether a trial has finished measuring; where its script ended before that, its own exit counts."""
    path = folder / ANSWER_FILE
    return path.exists() and store.read_record(path, Answer).complete


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace")


def recipe_flags(settings: Settings) -> list[str]:
    """Settings as flags that all recipes take; given after the user's own, they win."""
    values = {
        "--workers": settings.num_workers,
        "--batch-size": settings.batch_size,
        "--accumulation": settings.accumulation,
        "--precision": settings.precision,
    }
    flags = [word for flag, value in values.items() if value is not None for word in (flag, str(value))]
    return [*flags, "--compile"] if settings.compile else flags
