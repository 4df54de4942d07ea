"""One trial from outside: started, sampled, held to its limits, and ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fulltilt import store
from fulltilt.probes.gpu import Gpus
from fulltilt.probes.host import HostProbe
from fulltilt.probes.sampler import Sampler
from fulltilt.records import RunRecord, Sample
from fulltilt.tuning.assignment import ANSWER_FILE, ASSIGNMENT_FILE, Answer, Assignment
from fulltilt.tuning.processes import OUTPUT_FILE, Starts

LOOK_EVERY_S = 0.05
SAMPLE_EVERY_S = 0.5
# Having answered, a trial has this long to end by itself; other ranks may wait for the one that answered.
LAST_WORDS_S = 5.0
TAIL_BYTES = 8192


@dataclass(frozen=True, slots=True)
class Limits:
    """What a trial may use. ``memory_bytes`` counts its whole process tree."""

    time_s: float
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """How a trial's process ended. ``status`` is None when it could not be started or its end was not seen."""

    status: int | None
    stopped_for: Literal["time", "memory", None]
    wall_s: float
    tail: str


def run_trial(
    starts: Starts,
    assignment: Assignment,
    record: RunRecord,
    limits: Limits,
    gpus: Gpus,
    tick: Callable[[float], None] = lambda _: None,
) -> Ended:
    """Run one trial in its folder, which is then a run folder like any other. Ctrl-C ends the trial and is raised."""
    folder = store.create_folder(Path(assignment.folder))
    store.write_json(folder / ASSIGNMENT_FILE, assignment)
    store.write_json(folder / store.RUN_FILE, record)
    t0_ns = time.perf_counter_ns()
    started = starts.start(folder, t0_ns)
    memory = _MemoryWatch(limits.memory_bytes)
    writer = store.LineWriter(folder / store.SAMPLES_FILE)

    def sampled(sample: Sample) -> None:
        writer.write([sample])
        memory.see(sample)

    sampler = Sampler(sampled, gpus=gpus, host=HostProbe(started.pid), interval_s=SAMPLE_EVERY_S, t0=t0_ns * 1e-9)
    stopped_for: Literal["time", "memory", None] = None
    answered_at: float | None = None
    try:
        with sampler:
            while (status := started.poll()) is None:
                time.sleep(LOOK_EVERY_S)
                wall_s = (time.perf_counter_ns() - t0_ns) * 1e-9
                tick(wall_s)
                if answered_at is None and has_answered(folder):
                    answered_at = wall_s
                if answered_at is not None and wall_s - answered_at > LAST_WORDS_S:
                    started.kill()
                elif answered_at is None and memory.exceeded:
                    stopped_for = "memory"
                    started.kill()
                elif answered_at is None and wall_s > limits.time_s:
                    stopped_for = "time"
                    started.kill()
    except BaseException:
        started.kill()
        raise
    finally:
        writer.close()
    wall_s = (time.perf_counter_ns() - t0_ns) * 1e-9
    state: Literal["done", "crashed", "killed"] = "done" if status == 0 else "killed" if status < 0 else "crashed"
    store.write_json(folder / store.RUN_FILE, replace(record, state=state, wall_s=wall_s, exit_code=status))
    return Ended(status, stopped_for, wall_s, _tail(folder / OUTPUT_FILE))


def has_answered(folder: Path) -> bool:
    """Whether a trial has measured what it was to measure. One whose script ended before may still be ending it."""
    path = folder / ANSWER_FILE
    return path.exists() and store.read_record(path, Answer).complete


class _MemoryWatch:
    """Whether the trial's processes together hold more memory than they may."""

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self.exceeded = False

    def see(self, sample: Sample) -> None:
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
