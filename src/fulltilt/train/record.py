"""Every training is also a run of Fulltilt: its ledger and its report lie in the training's own folder.

    OUT/run.json, steps.jsonl, samples.jsonl, findings.json, report.html      the latest attempt
    OUT/before-1/, before-2/, …                                               the attempts before it, the oldest first

An attempt is one call of ``train`` that makes a step. Each rank writes its own stream; the first rank writes the rest.
Whatever fails here is told once and costs the record, never the training.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from fulltilt import store
from fulltilt.errors import FulltiltError, StoppedEarly
from fulltilt.recorder import attach
from fulltilt.recorder.loader_tap import ENGINE, LoaderTap, TappedIterator
from fulltilt.recorder.loop_marks import LoopMarks
from fulltilt.recorder.run_files import Ended, RunFiles
from fulltilt.recorder.session import Session
from fulltilt.recorder.tapped import described, tap_on
from fulltilt.records import RankRecord, RunRecord, Settings
from fulltilt.report.explain import explain
from fulltilt.report.terminal import verdict_lines
from fulltilt.train import batches
from fulltilt.train.idle_gpu import IdleGpu
from fulltilt.train.job import samples_in
from fulltilt.train.machine import MachineWatch
from fulltilt.train.rig import Rig
from fulltilt.train.sources import BatchSource, MapSource, StepData

# How long the first rank waits for the others' last lines before it explains the run.
PATIENCE_S = 3.0


class TrainingRecord(LoopMarks):
    """Records one attempt, from its first step to its end however that comes."""

    def __init__(self, rig: Rig, t0_ns: int, watch: MachineWatch) -> None:
        # Under `fulltilt run` this process is being recorded already; then only the marks are of use.
        super().__init__(attach.current)
        self._rig, self._t0_ns, self._watch = rig, t0_ns, watch
        self._own: Session | None = None
        self._files: RunFiles | None = None
        self._tap: LoaderTap | None = None

    def __enter__(self) -> TrainingRecord:
        rig = self._rig
        if rig.screen.sampled:
            self._watch.listeners.append(rig.screen.note)
        attached = self._session is not None  # then `fulltilt run` warns
        if not attached and rig.settings.record:
            try:
                self._begin()
            except Exception as error:
                rig.screen.warn(f"this run is not recorded: {error}")
        if rig.screen.speaks and rig.device.type == "cuda" and not attached:
            self._watch.listeners.append(IdleGpu(rig.settings, rig.screen, rig.out if self._own is not None else None))
        # Nobody writes into the folder before the first rank has cleared it.
        rig.group.barrier()
        return self

    def _begin(self) -> None:
        rig = self._rig
        if rig.group.first:
            self._files = RunFiles(rig.out, rig.job.name, self._t0_ns, self._watch.gpus, _asked(rig))
            self._watch.listeners.append(self._files.take)
            if self._files.aside is not None:
                _mark_killed(self._files.aside)
        self._own = self._session = Session(torch, rig.out, self._t0_ns)
        for source in (rig.source, rig.eval_source):
            if isinstance(loader := getattr(source, "_loader", None), torch.utils.data.DataLoader):
                self._own.taps.of(loader).made_by = ENGINE
        self._own.begin_here()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session = None
        if self._own is not None:
            self._own.finish()
        if self._files is None:
            return
        try:
            self._files.close(*_ending(error))
            _wait_for_the_others(self._rig.out)
            _, diagnosis = explain(self._rig.out)
        except Exception as problem:
            why = problem.what if isinstance(problem, FulltiltError) else problem
            self._rig.screen.warn(f"this run has no report: {why}")
            return
        for line in verdict_lines(diagnosis, self._rig.out):
            self._rig.screen.say(line)

    def communication(self) -> contextlib.AbstractContextManager[None]:
        """See LoopMarks. A rank that is alone waits for nobody."""
        return contextlib.nullcontext() if self._rig.group.alone else super().communication()

    def steps(self, drawn: Iterator[StepData]) -> Iterator[StepData]:
        """The steps of an epoch with the wait for each of them measured."""
        source, session = self._rig.source, self._session
        if session is None or _has_a_loader(source):
            return drawn  # torch's own loader is measured at its own next()
        if self._tap is None:
            self._tap = tap_on(session.taps, _describe(self._rig), None, made_by=ENGINE)
        self._tap.passes += 1
        return _MeasuredSteps(session.taps, self._tap, drawn)


class _MeasuredSteps(TappedIterator):
    """Counts the samples of a step on this rank."""

    def _count(self, batch: StepData) -> int | None:
        tap, samples = self._tap, sum(batches.size(one) for one in batch.batches)
        tap.batches += 1
        tap.samples += samples
        tap.counted = True
        tap.inspect(batch.batches)
        return samples


def _has_a_loader(source: Any) -> bool:
    if isinstance(source, BatchSource):
        return isinstance(source.iterable, torch.utils.data.DataLoader)
    return isinstance(source, MapSource)


def _describe(rig: Rig) -> dict[str, Any]:
    data: Any = rig.job.data
    settings = rig.settings
    return described(
        data,
        dataset_len=samples_in(data),
        iterable=not hasattr(data, "__getitem__"),
        batch_size=settings.batch_size,
        num_workers=settings.workers,
        persistent_workers=settings.workers > 0,
    )


def _asked(rig: Rig) -> Settings:
    settings = rig.settings
    return Settings(
        num_workers=settings.workers,
        prefetch_factor=settings.prefetch,
        # Stages may each have their own.
        batch_size=None if any(stage.batch_size for stage in rig.stages) else settings.batch_size,
        accumulation=settings.accumulation,
        precision=rig.precision.name,
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
    """We hold the folder's lock: an attempt that says it is running was killed."""
    path = folder / store.RUN_FILE
    before = store.read_record(path, RunRecord)
    if before.state == "running":
        store.write_json(path, replace(before, state="killed"))


def _wait_for_the_others(folder: Path) -> None:
    """Other ranks end at the same step as this one; give them the time to write it down."""
    deadline = time.monotonic() + PATIENCE_S
    for path in sorted(folder.glob("rank-*.json")):
        while not store.read_record(path, RankRecord).finished and time.monotonic() < deadline:
            time.sleep(0.02)
