"""What a run shows while it trains: a bar with live figures, the status of the machine, and a summary of each epoch."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TextIO

import torch

from fulltilt.errors import FulltiltError
from fulltilt.probes.counters import rates_between, read_counters
from fulltilt.records import Buckets, Sample
from fulltilt.report.status import memory_line, status_line
from fulltilt.train import wording
from fulltilt.train.distributed import device_lines
from fulltilt.train.forecast import forecast
from fulltilt.train.guard import StepFigures
from fulltilt.train.logs import MetricLog
from fulltilt.train.peaks import higher
from fulltilt.train.settings import TrainSettings
from fulltilt.train.terminal import Terminal
from fulltilt.train.trackers import Trackers

# The guides want fresh figures at least every tenth of an epoch. A log file gets little more than that, a terminal
# what an eye can follow.
REFRESH_SHARE = 0.1
LOG_EVERY_S = 60.0
DRAW_EVERY_S = 0.2


class Screen:
    """The only place of the engine that prints. Ranks but the first stay silent."""

    def __init__(self, out: Path, *, speaks: bool = True, stream: TextIO | None = None, sampled: bool = True) -> None:
        self.out = out
        self.speaks = speaks
        self.stream = stream or sys.stdout
        self.sampled = speaks and sampled
        self.debugging = os.environ.get("TRAINER_LOG_LEVEL", "").upper() == "DEBUG" or logging.getLogger(
            "fulltilt"
        ).isEnabledFor(logging.DEBUG)
        self.latest: Sample | None = None
        # The first reading of a sampler has no time before it over which a load could be measured: this is its start.
        self._before_sampling = read_counters(time.monotonic()) if self.sampled else None
        self.waits_s: list[float] = []
        self._terminal = Terminal(self.stream)
        self._log = MetricLog(out) if speaks else None
        self._trackers = Trackers(self.warn)
        self._relay = _Relay(self)
        self._log_every: int | None = None
        self._on_gpu = False
        self._peak: Sample | None = None
        self._metrics: dict[str, float] = {}
        self._watched: str | None = None
        self._asked: int | None = None
        self._batch_told: int | None = None
        self._epoch = self._epochs = self._global_step = 0
        self._steps: int | None = None
        self._last: int | None = None  # the step of the epoch that training gets to
        self._done = self._shown_at = self._resumed_at = 0
        self._samples = self._batches = self._queued = 0
        self._waited_s = 0.0
        self._began_s = self._shown_s = time.monotonic()
        self._trained_s: float | None = None

    def __enter__(self) -> Screen:
        if self.speaks:
            logging.getLogger("fulltilt").addHandler(self._relay)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("fulltilt").removeHandler(self._relay)
        self._terminal.keep()
        self._trackers.close()

    # ----------------------------------------------------------------------- lines

    def say(self, line: str) -> None:
        """Print a line."""
        if self.speaks:
            self._terminal.line(line)

    def warn(self, line: str) -> None:
        """Print a line that starts with a warning."""
        self.say(f"warning: {line}")

    def debug(self, line: str) -> None:
        """Print a line where logging is at DEBUG or ``TRAINER_LOG_LEVEL=DEBUG`` is set."""
        if self.debugging:
            self.say(line)

    # ----------------------------------------------------------------------- what the loop tells

    def begin(self, name: str, settings: TrainSettings, precision: str, epochs: int, gpu_names: Sequence[str]) -> None:
        """Say what the run trains, and on what."""
        self._watched, self._log_every = settings.monitor, settings.log_every
        self.open(epochs, settings.batch_size, gpu_names)
        if self.speaks:
            self._trackers.start(settings.trackers, self.out, name, dataclasses.asdict(settings))
        accumulated = f" × {settings.accumulation} accumulated" if settings.accumulation > 1 else ""
        self.debug(f"precision {precision}, batch {settings.batch_size}{accumulated}, seed {settings.seed}")

    def open(self, epochs: int, batch_size: int, gpu_names: Sequence[str]) -> None:
        """The same for a loop that is not the engine's: how long, in which batches, on which GPUs."""
        self._epochs, self._asked = epochs, batch_size
        self._on_gpu = bool(gpu_names)
        for line in device_lines(gpu_names):
            self.say(line)

    def epoch_begins(
        self, epoch: int, steps: int | None, done: int, batch_size: int | None = None, left: int | None = None
    ) -> None:
        """A new epoch, ``done`` of its ``steps`` already behind us after a resume, in batches of ``batch_size``.

        ``left``: how many steps the whole run may still make, where it ends by their number.
        """
        self._epoch, self._steps, self._done, self._shown_at = epoch, steps, done, done
        self._last = steps if steps is None or left is None else min(steps, done + left)
        self._resumed_at = done
        self._asked = batch_size or self._asked
        self._samples = self._batches = self._queued = 0
        self.waits_s = []
        self._waited_s = 0.0
        self._peak = self._trained_s = None
        self._began_s = self._shown_s = time.monotonic()
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()

    def loaded(self, wait_s: float, batches: int = 1) -> None:
        """The loop waited this long for the ``batches`` of a step."""
        self._waited_s += wait_s
        self.waits_s.append(wait_s / max(batches, 1))

    def stepped(self, samples: int, batches: int = 1) -> None:
        """A step of so many batches has been queued. The first one, and the first of another size, is told."""
        self._queued += 1
        self._batches += max(batches, 1)
        # The last step of several may be what is left of the data: after a resume just there, the next one tells.
        rest = self._steps is not None and 1 < self._steps == self._resumed_at + self._queued
        if self._asked is not None and self._asked != self._batch_told and not rest:
            self._batch_told = self._asked
            self.say(wording.batch_size(-(-samples // max(batches, 1)), self._asked))
            self._say_memory()

    def step(self, figures: StepFigures, samples: int) -> None:
        """A step is done and its figures have arrived."""
        self._done += 1
        if self._queued < self._done - self._resumed_at:  # another trainer's loop tells both at once
            self.stepped(samples)
        self._samples += samples
        self._global_step = figures.step
        tenth = max(int((self._steps or 10) * REFRESH_SHARE), 1)
        now = time.monotonic()
        pause_s = DRAW_EVERY_S if self._terminal.live else LOG_EVERY_S
        fresh_tenth = self._done - self._shown_at >= tenth
        if fresh_tenth or now - self._shown_s >= pause_s:
            self._shown_at = self._done if fresh_tenth else self._shown_at
            self._shown_s = now
            if self.speaks:
                self._terminal.bar(self._bar(figures, now))
        if (figures.step % self._log_every == 0) if self._log_every else fresh_tenth:
            rate = self._samples / max(now - self._began_s, 1e-9)
            figures_now = {"loss": figures.loss, "grad_norm": figures.grad_norm, "samples_per_s": rate}
            self._trackers.log(figures_now, figures.step)

    def epoch_trained(self) -> None:
        """The steps of the epoch are done; what follows (evaluation) is not their time."""
        self._trained_s = time.monotonic() - self._began_s
        self._terminal.keep()

    def epoch_ends(self, epoch: int, metrics: dict[str, float]) -> None:
        """The summary of an epoch."""
        seconds = time.monotonic() - self._began_s
        self._terminal.keep()
        self._metrics = metrics
        self.say(f"Epoch {epoch + 1}/{self._epochs}: {wording.metrics(metrics)}")
        self.say(wording.epoch_time(self._trained_s or seconds, self._samples, self._batches))
        self._say_memory()
        if self.latest is not None:
            self.say(f"Final - {status_line(self.latest)}")
            self.say(f"Peak - {status_line(self._peak or self.latest)}")
        self.debug(wording.loader_profile(self.waits_s))
        if self._log is not None:
            try:
                self._log.write(epoch + 1, metrics, seconds)
            except FulltiltError as error:  # the checkpoint decides whether the disk ends the run
                self.warn(error.what)
        self._trackers.log({"epoch": epoch + 1, "epoch_s": seconds, **metrics}, self._global_step)

    def outlook(self, history: Sequence[tuple[float, float]], target: float, mode: Literal["max", "min"]) -> None:
        """When the watched metric will reach its target, at the pace of the epoch that has just ended."""
        self.say(f"Forecast: {forecast(history, target, time.monotonic() - self._began_s, mode).sentence}")

    def epoch_so_far(self) -> Buckets:
        """What the screen itself knows of the epoch's time: how much of it was waiting for data."""
        passed_s = time.monotonic() - self._began_s
        return Buckets(data_wait_s=self._waited_s, host_code_s=max(passed_s - self._waited_s, 0.0))

    def end(self, metrics: dict[str, float]) -> None:
        """The run is over."""
        self.debug(f"done: {wording.metrics(metrics)}")

    def note(self, sample: Sample) -> None:
        """What the machine does now; called from the sampler's thread."""
        if sample.host.cpu_pct is None and self._before_sampling is not None:
            so_far = rates_between(self._before_sampling, read_counters(time.monotonic()))
            sample = dataclasses.replace(sample, host=dataclasses.replace(sample.host, cpu_pct=so_far.cpu_pct))
        self.latest = sample
        self._peak = higher(self._peak, sample)

    # ----------------------------------------------------------------------- how it looks

    def _bar(self, figures: StepFigures, now: float) -> list[str]:
        rate = self._samples / max(now - self._began_s, 1e-9)
        parts = [f"Epoch {self._epoch + 1}/{self._epochs} {wording.bar(self._done, self._steps)}"]
        parts.append(f"{wording.rate(rate)} samples/s")
        if self._last and self._done > self._resumed_at:
            left = (self._last - self._done) * (now - self._began_s) / (self._done - self._resumed_at)
            parts.append(f"ETA {wording.duration(left)}")
        parts.append(f"loss {figures.loss:.4g}")
        watched = wording.watched_metric(self._metrics, self._watched)
        if watched is not None:
            parts.append(wording.metrics(dict([watched])))
        line = " ".join(parts)
        return [line] if self.latest is None else [line, status_line(self.latest)]

    def _say_memory(self) -> None:
        if self._on_gpu:
            self.say(memory_line(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()))


class _Relay(logging.Handler):
    """What the floors below have to say (a sample skipped, a tier given up) goes to the screen, not into its bar."""

    def __init__(self, screen: Screen) -> None:
        super().__init__(logging.WARNING)
        self._screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        self._screen.warn(record.getMessage())


class Silence(Screen):
    """A screen that shows and samples nothing, for tests and benchmarks."""

    def __init__(self, out: Path) -> None:
        super().__init__(out, speaks=False)
