"""Loaders under live tuning inside the test's own process, with the controller's moves written down beforehand."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.data import Dataset

from fulltilt.recorder.session import Session
from fulltilt.store import create_folder
from fulltilt.tuning.live import Live
from fulltilt.tuning.live.controller import Capacity, Settle
from fulltilt.tuning.live.limits import LiveLimits
from fulltilt.tuning.live.loader_check import BatchCheck
from fulltilt.tuning.live.measurement import Knobs

# One batch is enough for a judgement, so that moves come one upon the other.
HASTY = LiveLimits(
    warm_up_batches=0,
    least_batches=1,
    least_s=0.0,
    most_s=0.0,
    settle_s=0.0,
    shortest_pass=0,
    batch_s=20.0,
)
ROOMY = Capacity(cpus=8)


class Squares(Dataset[tuple[torch.Tensor, int]]):
    """Deterministic, and each sample is unlike all others."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3,), float(index * index)), index


class Tuning:
    """A session with live tuning in which the moves are ``script`` and each of them is kept as ``keeps`` says."""

    def __init__(
        self, folder: Path, script: Sequence[Knobs], keeps: Sequence[bool | None], limits: LiveLimits, exact: bool
    ) -> None:
        self.script = list(script)
        self.keeps = list(keeps)
        self.session = Session(torch, create_folder(folder), time.perf_counter_ns())
        self.live = Live(self.session, limits, exact)

    def decide(self, *_: Any) -> Knobs | Settle:
        return self.script.pop(0) if self.script else Settle("the script is over")

    def pays(self, *_: Any) -> bool | None:
        return self.keeps.pop(0) if self.keeps else True

    @property
    def record(self) -> Any:
        return self.tuner.record

    @property
    def tuner(self) -> Any:
        (tuner,) = self.live.tuners.values()
        return tuner

    @property
    def source(self) -> Any:
        """The iterator of the pass that goes on."""
        source = self.tuner._source()
        assert source is not None
        return source

    def trains(self, loader: Any) -> Any:
        """Say that this loader feeds a training, as a backward would."""
        self.session.loaders.of(loader).trains = True
        return loader


@contextlib.contextmanager
def tuning(
    folder: Path,
    script: Sequence[Knobs],
    keeps: Sequence[bool | None] = (),
    limits: LiveLimits = HASTY,
    capacity: Capacity = ROOMY,
    exact: bool = False,
    clearly: bool = False,
) -> Iterator[Tuning]:
    """Live tuning with written moves, each of which pays ``clearly`` or not, for as long as the block lasts.

    The check of batches holds training up, so that every move comes at its batch.
    """
    one = Tuning(folder, script, keeps, limits, exact)
    one.session.install()
    one.session.loaders.live = one.live.begin
    home = "fulltilt.tuning.live.tuner"
    try:
        with (
            patch.dict("os.environ", {"FULLTILT_DEBUG": "1"}),  # an error of tuning's own fails the test
            patch(f"{home}.decide", one.decide),
            patch(f"{home}.pays", one.pays),
            patch(f"{home}.pays_clearly", lambda *_: clearly),
            patch.object(BatchCheck, "begin", _begin_and_wait),
            patch("fulltilt.tuning.live.process.measure_capacity", lambda *_: capacity),
        ):
            yield one
    finally:
        one.live.tuners.clear()
        one.session.finish()


begin = BatchCheck.begin


def _begin_and_wait(check: BatchCheck, loader: Any, make: Any) -> None:
    begin(check, loader, make)
    if check.thread is not None:
        check.thread.join(60)
        assert check.verdict is not None


def flat(batch: Any) -> Any:
    """A batch as plain numbers."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {key: flat(part) for key, part in batch.items()}
    return [flat(part) for part in batch] if isinstance(batch, list | tuple) else batch


def generators_now() -> tuple[Any, ...]:
    """The state of the random generators of this process."""
    return torch.get_rng_state().tolist(), random.getstate()
