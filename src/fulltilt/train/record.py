"""Records every training as a run of Fulltilt, in the training's own folder.

    OUT/run.json, steps.jsonl, samples.jsonl, findings.json, report.html      the latest attempt
    OUT/before-1/, before-2/, …                                               the attempts before it, the oldest first

An attempt is one call of ``train`` that makes a step. Each rank writes its own steps; the first rank writes the rest.
An error here is reported once and ends the record, never the training.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from fulltilt import store
from fulltilt.diagnosis import low_gpu_warning
from fulltilt.errors import FulltiltError, RunFolderError, StoppedEarly
from fulltilt.probes.gpu import Gpus
from fulltilt.probes.host import HostProbe
from fulltilt.probes.sampler import Sampler
from fulltilt.recorder import attach
from fulltilt.recorder.loaders import ENGINE
from fulltilt.recorder.manual_recording import Ended, LoopMarks, RunFiles, job_root
from fulltilt.recorder.rank_files import WARN_AFTER_S, SpanFollower
from fulltilt.recorder.session import Session
from fulltilt.records import RankRecord, RunRecord, Sample, Settings
from fulltilt.report.answer import explain
from fulltilt.report.terminal import verdict_lines
from fulltilt.train.data_source import BatchSource
from fulltilt.train.progress import TrainingScreen
from fulltilt.train.train_state import TrainState


class IdleGpu:
    """Warns of an idle GPU, from the machine's samples and the run recorded in ``folder``."""

    def __init__(self, screen: TrainingScreen, folder: Path) -> None:
        self._screen, self._folder = screen, folder
        self._following = SpanFollower(folder)
        self._samples: list[Sample] = []
        self._told: set[str] = set()

    def __call__(self, sample: Sample) -> None:
        """Take one sample, and warn once for each cause if the GPU idled for the last twenty seconds."""
        self._samples.append(sample)
        used = [gpu.util_pct for one in self._samples for gpu in one.gpus if gpu.util_pct is not None]
        with contextlib.suppress(RunFolderError):  # reported at the end
            self._following.read()
            recent = self._following.recent_buckets(WARN_AFTER_S)
            if not used or len(self._samples) < WARN_AFTER_S or recent.total_s - recent.startup_s < WARN_AFTER_S:
                return
            self._samples.clear()
            lines = low_gpu_warning(sum(used) / len(used), recent, lambda: store.load(self._folder))
            if lines and lines[1] not in self._told:
                self._told.add(lines[1])
                self._screen.warn(lines[0])
                for line in lines[1:]:
                    self._screen.say(f"  {line}")


# --------------------------------------------------------------------------- torch.profiler


# The first steps compile, allocate and fill caches; the profiler itself needs a step or two.
PROFILER_SKIPS = 3
PROFILER_WARM_UP = 2


@contextlib.contextmanager
def profiled_steps(state: TrainState, marks: LoopMarks) -> Iterator[Callable[[], None]]:
    """Profiles ``profile_steps`` steps after the first ones; yields a function to call after every step."""
    settings = state.settings
    if settings.profile_steps is None:
        yield lambda: None
        return

    def write(profile: Any) -> None:
        marks.mark_profiling(False)
        path = state.out / "profile" / f"step-{state.progress.step:08d}.rank-{state.group.info.rank}.json.gz"
        try:
            folder = store.OwnedFolder.around(path.parent)
            if folder is None:  # a rank on a machine that does not share OUT
                return
            folder.make(path.parent)
            folder.announce(path)
            profile.export_chrome_trace(str(path))
            folder.record(path)
        except (OSError, RuntimeError, FulltiltError) as error:  # profiling must not end the training
            state.screen.warn(f"the profile was not written: {error}")
            return
        state.screen.say(f"Profile: {path} (open it at https://ui.perfetto.dev)")

    marks.mark_profiling(True)
    steps = settings.profile_steps
    schedule = torch.profiler.schedule(wait=PROFILER_SKIPS, warmup=PROFILER_WARM_UP, active=steps, repeat=1)
    try:
        with torch.profiler.profile(schedule=schedule, on_trace_ready=write, record_shapes=True) as profile:
            yield profile.step
    finally:
        marks.mark_profiling(False)


# --------------------------------------------------------------------------- the run record


# How long the first rank waits for the others' last lines before it explains the run.
PATIENCE_S = 3.0


class TrainingRecord(LoopMarks):
    """Records one attempt, from its first step to its end or failure."""

    def __init__(self, state: TrainState, t0_ns: int) -> None:
        # Under `fulltilt run` this process is recorded already: only the marks are used.
        super().__init__(attach.current)
        self._state, self._t0_ns = state, t0_ns
        self._listeners: list[Callable[[Sample], None]] = []
        self._sampler: Sampler | None = None
        self._own: Session | None = None
        self._files: RunFiles | None = None

    def __enter__(self) -> TrainingRecord:
        state = self._state
        if state.screen.sampled:
            self._listeners.append(state.screen.note)
        if self._session is None and state.settings.record:  # else `fulltilt run` records, and warns
            try:
                self._begin()
            except Exception as error:
                state.screen.warn(f"this run is not recorded: {error}")
        # The recorder measures torch's loaders and the feed's by itself.
        if isinstance(state.source, BatchSource) and not hasattr(state.source.iterable, "begin_at"):
            state.source.iterable = self.loader(state.source.iterable)
        if state.screen.speaks and state.device.type == "cuda" and self._own is not None:
            self._listeners.append(IdleGpu(state.screen, state.out))
        # Nobody writes into the folder before the first rank has cleared it.
        state.group.barrier()
        if self._listeners:
            self._sampler = Sampler(self._tell, gpus=self._gpus, host=HostProbe(job_root()), t0=self._t0_ns * 1e-9)
            self._sampler.start()
        return self

    @cached_property
    def _gpus(self) -> Gpus:
        """The GPUs of the job, opened on first use: the driver may take long."""
        return Gpus.open(root_pid=job_root())

    def _tell(self, sample: Sample) -> None:
        for listener in self._listeners:
            listener(sample)

    def _begin(self) -> None:
        state = self._state
        if state.group.first:
            self._files = RunFiles(state.out, state.job.name, self._t0_ns, self._gpus, _asked(state))
            self._listeners.append(self._files.take)
            if self._files.aside is not None:
                _mark_killed(self._files.aside)
        self._own = self._session = Session(torch, state.out, self._t0_ns)
        for source in (state.source, state.eval_source):
            if isinstance(loader := getattr(source, "_loader", None), torch.utils.data.DataLoader):
                self._own.loaders.of(loader).made_by = ENGINE
        self._own.begin_here()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # While the sampler's thread is still in the driver, closing would crash the process.
        if self._sampler is not None and self._sampler.stop():
            self._gpus.close()
        self._session = None
        if self._own is not None:
            self._own.finish()
        if self._files is None:
            return
        try:
            self._files.close(*_ending(error))
            _wait_for_the_others(self._state.out)
            _, diagnosis = explain(self._state.out)
        except Exception as problem:
            why = problem.what if isinstance(problem, FulltiltError) else problem
            self._state.screen.warn(f"this run has no report: {why}")
            return
        for line in verdict_lines(diagnosis, self._state.out):
            self._state.screen.say(line)

    def communication(self) -> contextlib.AbstractContextManager[None]:
        """See LoopMarks. A single rank does not communicate."""
        return contextlib.nullcontext() if self._state.group.alone else super().communication()


def _asked(state: TrainState) -> Settings:
    settings = state.settings
    return Settings(
        num_workers=settings.workers,
        prefetch_factor=settings.prefetch,
        # Stages may each have their own.
        batch_size=None if any(stage.batch_size for stage in state.stages) else settings.batch_size,
        accumulation=settings.accumulation,
        precision=state.stepper.precision,
        compile=settings.compile,
        residency=settings.residency,
    )


def _ending(error: BaseException | None) -> tuple[Ended, int | None]:
    if error is None:
        return "done", 0
    if isinstance(error, StoppedEarly):
        return "interrupted", error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 130
    return "crashed", error.exit_code if isinstance(error, FulltiltError) else 1


def _mark_killed(folder: Path) -> None:
    """Mark an attempt that says it is running: as we hold the folder's lock, it was killed."""
    path = folder / store.RUN_FILE
    before = store.read_record(path, RunRecord)
    if before.state == "running":
        store.write_json(path, replace(before, state="killed"))


def _wait_for_the_others(folder: Path) -> None:
    """Other ranks end at the same step; wait until they have written their records."""
    deadline = time.monotonic() + PATIENCE_S
    for path in sorted(folder.glob("rank-*.json")):
        while not store.read_record(path, RankRecord).finished and time.monotonic() < deadline:
            time.sleep(0.02)
