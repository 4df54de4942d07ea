"""What a run shows while it trains: a bar with live figures, the status of the machine, and a summary of each epoch."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import torch

from fulltilt.records import Sample
from fulltilt.report.status import memory_line, status_line
from fulltilt.train import wording
from fulltilt.train.distributed import device_lines
from fulltilt.train.guard import StepFigures
from fulltilt.train.logs import MetricLog

if TYPE_CHECKING:
    from fulltilt.train.setup import Rig

# The guides want fresh figures at least every tenth of an epoch; a long epoch gets them every few seconds.
REFRESH_SHARE = 0.1
REFRESH_S = 5.0


class Screen:
    """The only place of the engine that prints. Ranks but the first stay silent."""

    def __init__(self, out: Path, *, speaks: bool = True, stream: TextIO | None = None, sampled: bool = True) -> None:
        self.out = out
        self.speaks = speaks
        self.stream = stream or sys.stdout
        self.debugging = os.environ.get("TRAINER_LOG_LEVEL", "").upper() == "DEBUG"
        self.latest: Sample | None = None
        self.sampled = speaks and sampled
        self._log = MetricLog(out) if speaks else None
        self._peak_gpu_pct: float | None = None
        self._waits_s: list[float] = []
        self._epoch = self._epochs = 0
        self._steps: int | None = None
        self._done = self._shown_at = 0
        self._samples = self._batches = 0
        self._began_s = self._shown_s = time.monotonic()
        self._first_step = True
        self._resumed_at = 0

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        if self._log is not None:
            self._log.close()

    # ----------------------------------------------------------------------- lines

    def say(self, line: str) -> None:
        """Print a line."""
        if self.speaks:
            print(line, file=self.stream, flush=True)

    def warn(self, line: str) -> None:
        """Print a line that starts with a warning."""
        self.say(f"warning: {line}")

    def debug(self, line: str) -> None:
        """Print a line under ``TRAINER_LOG_LEVEL=DEBUG``."""
        if self.debugging:
            self.say(line)

    # ----------------------------------------------------------------------- what the loop tells

    def begin(self, rig: Rig) -> None:
        """Say on what the run trains."""
        names = []
        if rig.device.type == "cuda":
            names = [str(name) for name in rig.group.gather(torch.cuda.get_device_name(rig.device))]
        settings = rig.settings
        self.open(rig.epochs, settings.batch_size, names)
        accumulated = f" × {settings.accumulation} accumulated" if settings.accumulation > 1 else ""
        self.debug(f"precision {rig.precision.name}, batch {settings.batch_size}{accumulated}, seed {settings.seed}")

    def open(self, epochs: int, batch_size: int, gpu_names: Sequence[str]) -> None:
        """The same for a loop that is not the engine's: how long, in which batches, on which GPUs."""
        self._epochs, self._asked = epochs, batch_size
        for line in device_lines(gpu_names):
            self.say(line)

    def epoch_begins(self, epoch: int, steps: int | None, done: int) -> None:
        """A new epoch, ``done`` of its ``steps`` already behind us after a resume."""
        self._epoch, self._steps, self._done, self._shown_at = epoch, steps, done, done
        self._resumed_at = done
        self._samples = self._batches = 0
        self._waits_s = []
        self._peak_gpu_pct = None
        self._began_s = self._shown_s = time.monotonic()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def loaded(self, wait_s: float) -> None:
        """The loop waited this long for the data of a step."""
        self._waits_s.append(wait_s)

    def step(self, figures: StepFigures, samples: int) -> None:
        """A step is done and its figures have arrived."""
        self._done += 1
        self._batches += 1
        self._samples += samples
        if self._first_step:
            self._first_step = False
            self.say(wording.batch_size(samples, samples) if self._asked is None else self._batch_line(samples))
            self._say_memory()
        tenth = max(int((self._steps or 10) * REFRESH_SHARE), 1)
        now = time.monotonic()
        if self._done - self._shown_at >= tenth or now - self._shown_s >= REFRESH_S:
            self._shown_at, self._shown_s = self._done, now
            self.say(self._bar_line(figures, now))

    def epoch_ends(self, epoch: int, metrics: dict[str, float]) -> None:
        """The summary of an epoch."""
        seconds = time.monotonic() - self._began_s
        self.say(f"Epoch {epoch + 1}/{self._epochs}: {wording.metrics(metrics)}")
        self.say(wording.epoch_time(seconds, self._samples, self._batches))
        self._say_memory()
        if self.latest is not None:
            peak = "" if self._peak_gpu_pct is None else f" (peak GPU {self._peak_gpu_pct:.0f}%)"
            self.say(f"{status_line(self.latest)}{peak}")
        self.debug(wording.loader_profile(self._waits_s))
        if self._log is not None:
            self._log.write(epoch + 1, metrics, seconds)

    def end(self, metrics: dict[str, float]) -> None:
        """The run is over."""
        self.debug(f"done: {wording.metrics(metrics)}")

    # ----------------------------------------------------------------------- how it looks

    _asked: int | None = None

    def _batch_line(self, samples: int) -> str:
        return wording.batch_size(min(samples, self._asked or samples), self._asked or samples)

    def _bar_line(self, figures: StepFigures, now: float) -> str:
        rate = self._samples / max(now - self._began_s, 1e-9)
        parts = [f"Epoch {self._epoch + 1}/{self._epochs} {wording.bar(self._done, self._steps)}"]
        parts.append(f"{rate:.0f} samples/s")
        if self._steps and self._done > self._resumed_at:
            left = (self._steps - self._done) * (now - self._began_s) / (self._done - self._resumed_at)
            parts.append(f"ETA {wording.duration(left)}")
        parts.append(f"loss {figures.loss:.4g}")
        line = " ".join(parts)
        return line if self.latest is None else f"{line} | {status_line(self.latest)}"

    def _say_memory(self) -> None:
        if torch.cuda.is_available():
            self.say(memory_line(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()))

    def note(self, sample: Sample) -> None:
        """What the machine does now; called from the sampler's thread."""
        self.latest = sample
        used = [gpu.util_pct for gpu in sample.gpus if gpu.util_pct is not None]
        if used:
            self._peak_gpu_pct = max(*used, self._peak_gpu_pct or 0.0)


class Silence(Screen):
    """A screen that shows and samples nothing, for tests and benchmarks."""

    def __init__(self, out: Path) -> None:
        super().__init__(out, speaks=False)
