"""The output of a training: its lines, and a progress bar on a terminal."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, TextIO, TypeVar

import torch

from fulltilt import figures as words
from fulltilt.diagnosis.metric_forecast import forecast
from fulltilt.errors import FulltiltError
from fulltilt.figures import clean
from fulltilt.records import GpuReading, HostReading, Sample
from fulltilt.report.console import can_redraw, encodable
from fulltilt.report.status_line import memory_line, status_line
from fulltilt.train.config import TrainSettings
from fulltilt.train.guards import StepFigures
from fulltilt.train.metrics import log_metrics

Reading = TypeVar("Reading", HostReading, GpuReading)


def epoch_time_line(seconds: float, samples: int, batches: int) -> str:
    """``Epoch time: 120s (412 samples/sec, 3.2 batches/sec)``."""
    safe_s = max(seconds, 1e-9)
    steps = batches / safe_s
    told = f"{steps:.1f}" if steps >= 1 else rate_text(steps)
    return f"Epoch time: {seconds:.0f}s ({rate_text(samples / safe_s)} samples/sec, {told} batches/sec)"


def rate_text(per_s: float) -> str:
    """``412``; two digits for less than 10."""
    return f"{per_s:.0f}" if per_s >= 9.95 else f"{per_s:.2g}"


def bar_text(done: int, total: int | None) -> str:
    """``[██████····] 60%``; only a count when the total is not known."""
    if not total:
        return f"step {done}"
    filled = min(20 * done // total, 20)
    return f"[{'█' * filled:·<20}] {min(100 * done // total, 100):3d}%"


# --------------------------------------------------------------------------- peaks


def peak_of(before: Sample | None, now: Sample) -> Sample:
    """``now`` with each figure of the status line at its highest so far; None where never measured."""
    if before is None:
        return now
    known = {gpu.uuid: gpu for gpu in before.gpus}
    gpus = tuple(_highest(known.get(gpu.uuid, gpu), gpu, "util_pct", "vram_used_bytes") for gpu in now.gpus)
    return replace(now, host=_highest(before.host, now.host, "cpu_pct", "mem_used_bytes"), gpus=gpus)


def _highest(before: Reading, now: Reading, *names: str) -> Reading:
    both = {name: [value for one in (before, now) if (value := getattr(one, name)) is not None] for name in names}
    return replace(now, **{name: max(values, default=None) for name, values in both.items()})  # type: ignore[arg-type]


# --------------------------------------------------------------------------- terminal


class Terminal:
    """Writes to ``stream``, if there is one. Where that is no terminal, the bar is written as an ordinary line."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.live = stream is not None and can_redraw(stream)
        self._rows = 0
        self._lock = threading.Lock()  # warnings come from the sampler's thread

    def line(self, text: str) -> None:
        """Write a line that stays, above the bar."""
        with self._lock:
            self._write(f"{self._wiped()}{_one_row(text)}\n")

    def bar(self, parts: Sequence[str]) -> None:
        """Draw the bar: its parts in one row if they fit, else a row each, cut to the width."""
        parts = [_one_row(part) for part in parts]
        whole = " | ".join(parts)
        if not self.live:
            self.line(whole)
            return
        columns = shutil.get_terminal_size().columns - 1  # a full last column would wrap into the next row
        rows = [whole] if len(whole) <= columns else [part[:columns] for part in parts]
        with self._lock:
            self._write(self._wiped() + "\n".join(rows))
            self._rows = len(rows)

    def keep(self) -> None:
        """Leave the bar as it is and go on below it."""
        with self._lock:
            if self._rows:
                self._rows = 0
                self._write("\n")

    def _wiped(self) -> str:
        rows, self._rows = self._rows, 0
        return "\r" + "\x1b[1A" * (rows - 1) + "\x1b[J" if rows else ""

    def _write(self, text: str) -> None:
        stream = self._stream
        if stream is None:
            return
        try:
            stream.write(encodable(text, getattr(stream, "encoding", None) or "utf-8"))
            stream.flush()
        except (OSError, ValueError):  # ValueError: somebody has closed the stream
            self._stream = None  # the terminal or the reader of the pipe is gone: train on
            if stream is sys.stdout:  # or Python exits with code 120 for buffered output
                with contextlib.suppress(OSError, ValueError):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _one_row(text: str) -> str:
    """Text without terminal codes and line breaks, which names from outside may contain."""
    return clean(text).replace("\n", " ")


# --------------------------------------------------------------------------- the screen


# New figures every tenth of an epoch, and at least so often in a log file and on a terminal.
REFRESH_SHARE = 0.1
LOG_EVERY_S = 60.0
DRAW_EVERY_S = 0.2
# The rate shown is that of the last seconds.
RATE_OVER_S = 10.0


class TrainingScreen:
    """Everything that the engine prints. Only the first rank prints."""

    def __init__(self, out: Path, *, speaks: bool = True, stream: TextIO | None = None, sampled: bool = True) -> None:
        self.speaks = speaks
        self.stream = stream or sys.stdout
        self.sampled = speaks and sampled
        self.debugging = os.environ.get("TRAINER_LOG_LEVEL", "").upper() == "DEBUG" or logging.getLogger(
            "fulltilt"
        ).isEnabledFor(logging.DEBUG)
        self.latest: Sample | None = None
        self._terminal = Terminal(self.stream if speaks else None)
        self._out = out
        self._relay = _Relay(self)
        self._on_gpu = False
        self._peak: Sample | None = None
        self._asked: int | None = None
        self._batch_told: int | None = None
        self._epoch = self._epochs = 0
        self._steps: int | None = None
        self._last: int | None = None  # the step of the epoch that training gets to
        self._done = self._shown_at = self._queued = 0  # steps of the epoch
        self._samples = self._batches = 0
        self._wait_s = self._longest_wait_s = 0.0  # for data, of a batch
        self._began_s = self._shown_s = time.monotonic()
        self._trained_s: float | None = None
        self._recent: deque[tuple[float, int, int]] = deque()  # time, steps and samples of the epoch by then

    def __enter__(self) -> TrainingScreen:
        if self.speaks:
            logging.getLogger("fulltilt").addHandler(self._relay)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("fulltilt").removeHandler(self._relay)
        self._terminal.keep()

    # ----------------------------------------------------------------------- lines

    def say(self, line: str) -> None:
        """Print a line."""
        self._terminal.line(line)

    def warn(self, line: str) -> None:
        """Print a line that starts with a warning."""
        self.say(f"warning: {line}")

    def debug(self, line: str) -> None:
        """Print a line where logging is at DEBUG or ``TRAINER_LOG_LEVEL=DEBUG`` is set."""
        if self.debugging:
            self.say(line)

    # ----------------------------------------------------------------------- called by the loop

    def begin(self, settings: TrainSettings, precision: str, gpu_names: Sequence[str]) -> None:
        """Print the GPUs, and note epochs and batch size."""
        self._epochs, self._asked = settings.epochs, settings.batch_size
        self._on_gpu = bool(gpu_names)
        if gpu_names:
            self.say(f"Using {words.count('GPU', len(gpu_names))} for training")
        for index, gpu_name in enumerate(gpu_names):
            self.say(f"GPU {index}: {gpu_name}")
        accumulated = f" × {settings.accumulation} accumulated" if settings.accumulation > 1 else ""
        self.debug(f"precision {precision}, batch {settings.batch_size}{accumulated}, seed {settings.seed}")

    def epoch_begins(
        self, epoch: int, steps: int | None, done: int, batch_size: int | None = None, left: int | None = None
    ) -> None:
        """A new epoch of ``steps`` in batches of ``batch_size``; after a resume ``done`` of them are done.

        ``left``: the steps left in the run, if max_steps ends it.
        """
        self._epoch, self._steps = epoch, steps
        self._done = self._shown_at = self._queued = done
        self._last = steps if steps is None or left is None else min(steps, done + left)
        self._asked = batch_size or self._asked
        self._samples = self._batches = 0
        self._wait_s = self._longest_wait_s = 0.0
        self._peak = self._trained_s = None
        self._began_s = self._shown_s = time.monotonic()
        self._recent = deque([(self._began_s, done, 0)])
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()

    def stepped(self, samples: int, batches: int = 1, wait_s: float = 0.0) -> None:
        """A step was queued. The batch size is printed when it changes."""
        batches = max(batches, 1)
        self._queued += 1
        self._batches += batches
        self._wait_s += wait_s
        self._longest_wait_s = max(self._longest_wait_s, wait_s / batches)
        # Not on the last step of an epoch, which may be smaller.
        rest = self._steps is not None and 1 < self._steps == self._queued
        if self._asked is not None and self._asked != self._batch_told and not rest:
            self._batch_told = self._asked
            self.say(f"Batch size: {-(-samples // batches)} (expected: {self._asked})")
            self._say_memory()

    def step(self, figures: StepFigures, samples: int) -> None:
        """The figures of a step have arrived."""
        self._done += 1
        self._samples += samples
        tenth = max(int((self._steps or 10) * REFRESH_SHARE), 1)
        now = time.monotonic()
        self._recent.append((now, self._done, self._samples))
        while len(self._recent) > 2 and now - self._recent[1][0] >= RATE_OVER_S:
            self._recent.popleft()
        pause_s = DRAW_EVERY_S if self._terminal.live else LOG_EVERY_S
        fresh_tenth = self._done - self._shown_at >= tenth
        if fresh_tenth or now - self._shown_s >= pause_s:
            self._shown_at = self._done if fresh_tenth else self._shown_at
            self._shown_s = now
            self._terminal.bar(self._bar(figures))

    def epoch_trained(self) -> None:
        """The steps of the epoch are done; evaluation follows."""
        self._trained_s = time.monotonic() - self._began_s
        self._terminal.keep()

    def epoch_ends(self, epoch: int, metrics: dict[str, float]) -> None:
        """Print the summary of an epoch, and log its metrics."""
        seconds = time.monotonic() - self._began_s
        self._terminal.keep()
        told = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        self.say(f"Epoch {epoch + 1}/{self._epochs}: {told}")
        self.say(epoch_time_line(self._trained_s or seconds, self._samples, self._batches))
        self._say_memory()
        if self.latest is not None:
            self.say(f"Final - {status_line(self.latest)}")
            self.say(f"Peak - {status_line(self._peak or self.latest)}")
        mean_ms, longest_ms = 1e3 * self._wait_s / max(self._batches, 1), 1e3 * self._longest_wait_s
        self.debug(f"[TRAIN PROFILE] DataLoader avg: {mean_ms:.1f}ms, max: {longest_ms:.1f}ms")
        if self.speaks:
            try:
                log_metrics(self._out, epoch + 1, metrics, seconds)
            except FulltiltError as error:  # the checkpoint raises the same error
                self.warn(error.what)

    def outlook(self, history: Sequence[tuple[float, float]], target: float, mode: Literal["max", "min"]) -> None:
        """Print when the metric will reach its target, at the pace of the last epoch."""
        self.say(f"Forecast: {forecast(history, target, time.monotonic() - self._began_s, mode).sentence}")

    def note(self, sample: Sample) -> None:
        """Take a sample of the machine; called on the sampler's thread."""
        self.latest = sample
        self._peak = peak_of(self._peak, sample)

    # ----------------------------------------------------------------------- drawing

    def _bar(self, figures: StepFigures) -> list[str]:
        (began_s, steps, samples), (now_s, done, all_samples) = self._recent[0], self._recent[-1]
        passed_s = max(now_s - began_s, 1e-9)
        where = f"Epoch {self._epoch + 1}/{self._epochs} {bar_text(done, self._steps)}"
        parts = [where, f"{rate_text((all_samples - samples) / passed_s)} samples/s"]
        if self._last:
            parts.append(f"ETA {words.seconds(round((self._last - done) * passed_s / (done - steps)))}")
        parts.append(f"loss {figures.loss:.4g}")
        line = " ".join(parts)
        return [line] if self.latest is None else [line, status_line(self.latest)]

    def _say_memory(self) -> None:
        if self._on_gpu:
            self.say(memory_line(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()))


class _Relay(logging.Handler):
    """Prints logged warnings (a skipped sample, a dropped cache) above the bar."""

    def __init__(self, screen: TrainingScreen) -> None:
        super().__init__(logging.WARNING)
        self._screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        self._screen.warn(record.getMessage())
