"""What a run shows: its lines to the letter, the bar in a terminal, metrics.csv, a profile, the idle GPU."""

from __future__ import annotations

import gzip
import io
import json
import logging
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fulltilt.errors import ForeignFiles
from fulltilt.probes.gpu import Gpus
from fulltilt.recorder.rank_files import SpanFollower
from fulltilt.records import Buckets, HostReading, Run, Sample
from fulltilt.testing import FakeClock, FakeNvml, h200
from fulltilt.train import checkpoint, progress
from fulltilt.train.config import TrainSettings
from fulltilt.train.guards import StepFigures
from fulltilt.train.loop import train
from fulltilt.train.metrics import log_metrics
from fulltilt.train.progress import Terminal, TrainingScreen
from fulltilt.train.record import IdleGpu
from tests.diagnosis.examples import gpu_rank, loader, run_of, spans_of
from tests.faults import victim

GIB = 1024**3


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(out: Path, stream: io.StringIO | None = None, **settings: Any) -> str:
    stream = stream or io.StringIO()
    screen = TrainingScreen(out, stream=stream, sampled=False)
    train(victim.make_job(), TrainSettings(**{**victim.DEFAULTS, **settings}), out, screen=screen)
    return stream.getvalue()


@cache
def reading(util: float, vram: float, cpu: float, ram: float) -> Sample:
    clock = FakeClock()
    nvml = FakeNvml([h200(util_pct=util, vram_used_bytes=int(vram * GIB), vram_total_bytes=24 * GIB)], clock=clock)
    (gpu,) = Gpus.open(nvml, environ={}, clock=clock).read()
    host = HostReading(cpu_pct=cpu, mem_used_bytes=int(ram * GIB), mem_total_bytes=64 * GIB)
    return Sample(t_s=0.0, host=host, gpus=(gpu,))


# --------------------------------------------------------------------------- lines to the letter


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's allocator as far as the screen asks it."""
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: int(4.5 * GIB))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: int(5.2 * GIB))


def test_an_epoch_on_a_gpu_reads_as_the_guides_write_it(
    tmp_path: Path, on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order in which they come, with a clock that makes the guide's own figures."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    screen = TrainingScreen(tmp_path, stream=stream)
    screen.begin(TrainSettings(batch_size=128, epochs=20), "fp32", ["Tesla T4", "Tesla T4"])
    screen.debugging = True
    screen.epoch_begins(0, 384, 0)
    for step in range(384):
        screen.stepped(128, 1, 0.0781 if step == 0 else 0.02516)
        now[0] += 120 / 384
        screen.note(reading(85 if step < 300 else 70, 12.3, 45.2, 18.43))
        screen.step(StepFigures(step + 1, 0.5, 1.0, bad=False), 128 if step < 383 else 416)
    screen.epoch_trained()
    now[0] += 30.0  # evaluation
    screen.epoch_ends(0, {"train_loss": 0.5, "eval_accuracy": 0.9})
    lines = stream.getvalue().splitlines()
    memory = "GPU Memory - Allocated: 4.50 GB, Peak: 5.20 GB"
    status = "GPU: 85% | VRAM:12.3/24.0GB(51.2%) | CPU: 45.2% | RAM:18.4/64.0GB(28.8%)"
    assert lines[:5] == [
        "Using 2 GPUs for training",
        "GPU 0: Tesla T4",
        "GPU 1: Tesla T4",
        "Batch size: 128 (expected: 128)",
        memory,
    ]
    bars = [line for line in lines if "samples/s ETA" in line]
    assert len(bars) == 10
    assert bars[0] == f"Epoch 1/20 [█···················]   9% 410 samples/s ETA 1 min 48 s loss 0.5 | {status}"
    assert lines[-6:] == [
        "Epoch 1/20: train_loss 0.5, eval_accuracy 0.9",
        "Epoch time: 120s (412 samples/sec, 3.2 batches/sec)",
        memory,
        f"Final - {status.replace('85%', '70%')}",
        f"Peak - {status}",
        "[TRAIN PROFILE] DataLoader avg: 25.3ms, max: 78.1ms",
    ]


def test_what_is_left_of_an_epoch_is_not_taken_for_the_batch_size(tmp_path: Path) -> None:
    """Seen to fail: a run resumed at the last step of an epoch told `Batch size: 4 (expected: 8)` of 20 samples."""
    stream = io.StringIO()
    screen = TrainingScreen(tmp_path, stream=stream)
    screen.begin(TrainSettings(batch_size=8, epochs=2), "fp32", [])
    screen.epoch_begins(0, 3, done=2)
    screen.stepped(4)
    assert stream.getvalue() == ""
    screen.epoch_begins(1, 3, done=0)
    screen.stepped(8)
    assert stream.getvalue() == "Batch size: 8 (expected: 8)\n"


def test_a_run_that_ends_within_an_epoch_counts_down_to_its_own_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen to fail: with max_steps 3 of an epoch of 100 steps, the first minute promised 99 more."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    screen = TrainingScreen(tmp_path, stream=stream)
    screen.epoch_begins(0, 100, 0, left=3)
    for step in range(3):
        now[0] += 60.0
        screen.step(StepFigures(step + 1, 0.5, 1.0, bad=False), 8)
    assert re.findall(r" (\d+)% .* ETA (.*) loss", stream.getvalue()) == [("1", "2 min"), ("2", "1 min"), ("3", "0 s")]


def test_the_rate_is_that_of_the_last_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    screen = TrainingScreen(tmp_path, stream=stream)
    screen.epoch_begins(0, 100, 0)
    for step in range(100):
        now[0] += 60.0 if step == 0 else 0.5  # compiling
        screen.step(StepFigures(step + 1, 0.5, 1.0, bad=False), 8)
    assert re.findall(r"([\d.]+) samples/s ETA (.*) loss", stream.getvalue())[-2:] == [("16", "5 s"), ("16", "0 s")]


def test_the_screen_knows_how_many_steps_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int | None] = []
    begins = TrainingScreen.epoch_begins

    def noting(self: TrainingScreen, *given: Any) -> None:
        told.append(given[-1])
        begins(self, *given)

    monkeypatch.setattr(TrainingScreen, "epoch_begins", noting)
    run(tmp_path, epochs=1, max_steps=2)
    run(tmp_path, epochs=1, max_steps=5)
    run(tmp_path, epochs=1)
    assert told == [2, 3, None]


@pytest.mark.slow
def test_the_forecast_stands_below_each_epoch(tmp_path: Path) -> None:
    told = run(tmp_path, epochs=6, lr=0.003, monitor="loss", monitor_mode="min", target=0.01)
    lines = [line for line in told.splitlines() if line.startswith("Forecast: ")]
    assert len(lines) == 6
    assert lines[0] == "Forecast: 2 more epochs are needed for a forecast"
    assert "per epoch" in lines[-1]


def test_a_batch_that_is_not_what_was_asked_for_shows(tmp_path: Path) -> None:
    """44 samples in batches of 64; accumulation does not make a batch larger; a stage may have its own."""
    assert "Batch size: 44 (expected: 64)\n" in run(tmp_path / "a", batch_size=64, epochs=1)
    told = run(tmp_path / "b", batch_size=4, accumulation=3, epochs=1)
    assert "Batch size: 4 (expected: 4)\n" in told
    assert re.search(r"^Epoch time: \d+s \([\d.]+ samples/sec, [\d.]+ batches/sec\)$", told, re.MULTILINE)


def test_a_debugging_log_also_shows_the_loader_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINER_LOG_LEVEL", raising=False)
    logger = logging.getLogger("fulltilt")
    monkeypatch.setattr(logger, "level", logging.DEBUG)
    logger.manager._clear_cache()  # type: ignore[attr-defined]
    try:
        assert re.search(r"^\[TRAIN PROFILE\] DataLoader avg: \d+\.\dms", run(tmp_path, epochs=1), re.MULTILINE)
    finally:
        monkeypatch.undo()
        logger.manager._clear_cache()  # type: ignore[attr-defined]


# --------------------------------------------------------------------------- the terminal


def drawn(text: str, columns: int = 200) -> list[str]:
    """What a terminal shows after ``text``, row by row: only what the bar uses of it."""
    rows, row = [""], 0
    for piece in re.findall(r"\x1b\[1A|\x1b\[J|\r|\n|[^\x1b\r\n]+", text):
        if piece == "\x1b[1A":
            row -= 1
        elif piece == "\x1b[J":
            rows = [*rows[:row], ""]
        elif piece == "\n":
            row += 1
            rows += [""] * (row + 1 - len(rows))
        elif piece != "\r":
            assert len(piece) < columns
            rows[row] += piece
    return rows


@pytest.mark.parametrize("columns", [200, 50])
def test_the_bar_is_drawn_in_place_and_lines_stay_above_it(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Tty()
    terminal = Terminal(stream)
    status = "GPU: 85% | VRAM:12.3/24.0GB(51.2%) | CPU: 45.2% | RAM:18.4/64.0GB(28.8%)"
    for share in (10, 20, 30):
        terminal.bar([f"Epoch 1/2 {share}%", status])
        terminal.line(f"line {share}")
    terminal.bar(["Epoch 1/2 40%", status])
    terminal.keep()
    terminal.line("after")
    bar = [f"Epoch 1/2 40% | {status}"] if columns == 200 else ["Epoch 1/2 40%", status[:49]]
    assert drawn(stream.getvalue(), columns) == ["line 10", "line 20", "line 30", *bar, "after", ""]


def test_a_run_in_a_terminal_leaves_one_bar_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    rows = drawn(run(tmp_path, Tty()))
    assert [row[:9] for row in rows if "100%" in row] == ["Epoch 1/2", "Epoch 2/2"]
    assert not [row for row in rows if re.search(r" \d\d%", row)], "nothing of the way there is left"


class Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_terminal_that_was_closed_does_not_stop_the_training(tmp_path: Path) -> None:
    """Seen to fail: without the `except` of `Terminal._write` the run ends with a BrokenPipeError."""
    run(tmp_path, Closed(), epochs=1)
    assert (tmp_path / "metrics.csv").exists()


def test_a_terminal_without_unicode_gets_plain_characters() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Terminal(stream).line("Epoch 1/2 [██··]  50%")
    assert raw.getvalue() == b"Epoch 1/2 [##--]  50%\n"


# --------------------------------------------------------------------------- metrics.csv


def test_a_resumed_run_goes_on_in_the_same_table(tmp_path: Path) -> None:
    run(tmp_path, epochs=1)
    run(tmp_path, epochs=3)
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["epoch", "1", "2", "3"]


def epochs_in(out: Path) -> list[str]:
    return [line.split(",")[0] for line in (out / "metrics.csv").read_text().splitlines()]


def test_an_epoch_that_is_trained_once_more_has_one_row(tmp_path: Path) -> None:
    """Seen to fail: with appending alone, the epochs after the refused checkpoint stood there twice."""
    run(tmp_path, epochs=3)
    newest = max((tmp_path / "checkpoints").iterdir())
    (newest / "model.safetensors").write_bytes(b"damaged")
    first = (tmp_path / "metrics.csv").read_text().splitlines()
    assert "Falling back" in run(tmp_path, epochs=3)
    assert epochs_in(tmp_path) == ["epoch", "1", "2", "3"]
    again = (tmp_path / "metrics.csv").read_text().splitlines()
    assert again[:3] == first[:3], "the rows before stay as they were"
    assert again[3].split(",")[2:] == first[3].split(",")[2:], "a resume repeats the epoch"


def test_an_epoch_cut_short_is_told_whole_in_the_end(tmp_path: Path) -> None:
    run(tmp_path, epochs=2, max_steps=2)
    short = (tmp_path / "metrics.csv").read_text().splitlines()[1]
    run(tmp_path, epochs=2)
    assert epochs_in(tmp_path) == ["epoch", "1", "2"]
    assert (tmp_path / "metrics.csv").read_text().splitlines()[1].split(",")[2] != short.split(",")[2]


def test_epochs_without_an_evaluation_share_the_table(tmp_path: Path) -> None:
    run(tmp_path, epochs=3, eval_every=2)
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["epoch", "1", "2", "3"], "one header"
    assert len({line.count(",") for line in lines}) == 1
    assert [bool(line.split(",")[-1]) for line in lines] == [True, False, True, True], "the last is always evaluated"


def test_a_table_that_is_not_ours_keeps_every_line(tmp_path: Path) -> None:
    checkpoint.claim(tmp_path)
    for theirs in ("fold,epoch,note\na,1,good\n", "epoch,seconds\n1,2.0\n"):
        (tmp_path / "metrics.csv").write_text(theirs)
        with pytest.raises(ForeignFiles):
            log_metrics(tmp_path, 1, {"loss": 0.25}, 1.0)
        assert (tmp_path / "metrics.csv").read_text() == theirs


# --------------------------------------------------------------------------- the profile


def test_a_profile_of_some_steps_is_written_on_request(tmp_path: Path) -> None:
    told = run(tmp_path, profile_steps=2)
    (trace,) = (tmp_path / "profile").iterdir()
    assert f"Profile: {trace}" in told
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    steps = {event["name"] for event in events if str(event.get("name", "")).startswith("ProfilerStep#")}
    assert len(steps) == 2
    assert trace.name == "step-00000007.rank-0.json.gz"


# --------------------------------------------------------------------------- the idle GPU


class Idle:
    """A training on a GPU that is used as ``util`` says, seen for as many seconds as asked for."""

    def __init__(self, out: Path, monkeypatch: pytest.MonkeyPatch, util: float) -> None:
        self.stream = io.StringIO()
        self.spent, self.shares = Buckets(), dict[str, float]()
        monkeypatch.setattr(SpanFollower, "recent_buckets", lambda *_: self.spent)
        monkeypatch.setattr("fulltilt.store.load", self.load)
        self.warning, self.util = IdleGpu(TrainingScreen(out, stream=self.stream), out), util

    def load(self, _: Path) -> Run:
        loaders = (loader(where=None, made_by="fulltilt"),)
        return run_of(gpu_rank(loaders=loaders), spans=(spans_of(**self.shares),))

    def pass_by(self, seconds: int, **shares: float) -> str:
        for _ in range(seconds):
            self.spent = self.spent.plus(Buckets(**{f"{name}_s": each for name, each in shares.items()}))
            self.shares = {name: self.shares.get(name, 0.0) + each for name, each in shares.items()}
            self.warning(reading(self.util, 2.0, 50.0, 8.0))
        return self.stream.getvalue()


def test_little_gpu_use_is_told_once_for_each_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    idle = Idle(tmp_path, monkeypatch, util=11)
    assert idle.pass_by(19, data_wait=0.9, compute=0.1) == "", "twenty seconds of training first"
    low, cause, fix, settings = idle.pass_by(21, data_wait=0.9, compute=0.1).splitlines()
    assert low == "warning: GPU utilization is low (11 %)"
    assert cause == "  - most likely: Data loading: one thread"
    assert fix.startswith("  - it takes 90 % of the time after start-up. Set ")
    assert settings.startswith("  - settings in force: batch_size 32")
    assert idle.pass_by(60, data_wait=0.9, compute=0.1).count("GPU utilization") == 1
    assert idle.pass_by(400, validation=1.0).count("GPU utilization") == 2, "another cause"


def test_a_busy_gpu_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Idle(tmp_path, monkeypatch, util=30).pass_by(60, data_wait=0.9, host_code=0.1) == ""


def test_low_gpu_use_is_not_told_where_there_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener is not even there: a training on the CPU has no GPU to warn about."""
    made: list[Any] = []
    monkeypatch.setattr("fulltilt.train.record.IdleGpu", lambda *given: made.append(given))
    run(tmp_path, epochs=1)
    assert not made


def test_waits_of_an_endless_epoch_take_no_more_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_LOG_LEVEL", "DEBUG")
    stream = io.StringIO()
    screen = TrainingScreen(tmp_path, stream=stream, sampled=False)
    screen.epoch_begins(0, None, 0)
    for number in range(100):
        screen.stepped(8, 2, 0.002 if number else 0.202)
    assert not [value for value in vars(screen).values() if isinstance(value, list)]
    screen.speaks = False
    monkeypatch.setattr(screen, "say", lambda line: stream.write(f"{line}\n"))
    screen.epoch_ends(0, {})
    assert "[TRAIN PROFILE] DataLoader avg: 2.0ms, max: 101.0ms" in stream.getvalue()
