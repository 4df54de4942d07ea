"""The loop: what it trains, what it shows, how it goes on with other settings."""

from __future__ import annotations

import io
import os
import random
import re
import signal
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fulltilt.errors import UsageError
from fulltilt.train import checkpoint
from fulltilt.train.config import TrainSettings
from fulltilt.train.job import Job, Stage
from fulltilt.train.loop import Loop, train
from fulltilt.train.metrics import AsyncMetrics
from fulltilt.train.progress import TrainingScreen, epoch_time_line
from fulltilt.train.train_state import Outcome, StepEnd
from tests.faults import victim


def run(out: Path, job: Job | None = None, **settings: Any) -> tuple[Outcome, str]:
    stream = io.StringIO()
    screen = TrainingScreen(out, stream=stream, sampled=False)
    outcome = train(
        job or victim.make_job(), TrainSettings(**{"device": "cpu", "record": False, **settings}), out, screen=screen
    )
    return outcome, stream.getvalue()


def by_hand(steps: int, lr: float) -> torch.nn.Module:
    """The same job in a loop of ten lines."""
    job = victim.make_job(loss=plain_loss, data=FixedSamples())
    optimizer = torch.optim.SGD(job.model.parameters(), lr=lr, momentum=0.9)
    from fulltilt.train.sampler import EpochPlan

    order = EpochPlan(samples=44, batch_size=8).order()
    for step in range(steps):
        batch = [job.data[int(i)] for i in order[step * 8 : step * 8 + 8]]  # type: ignore[index]
        inputs, labels = torch.stack([b[0] for b in batch]), torch.stack([b[1] for b in batch])
        optimizer.zero_grad()
        plain_loss(job.model, (inputs, labels)).backward()
        optimizer.step()
    return job.model


class FixedSamples(victim.NoisySamples):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.inputs[index].sum() > 0


def plain_loss(model: Any, batch: Any) -> torch.Tensor:
    outputs = model.last(torch.relu(model.first(batch[0]))).squeeze(1)
    return torch.nn.functional.binary_cross_entropy_with_logits(outputs, batch[1].float())


@pytest.mark.parametrize(("batch_size", "accumulation"), [(8, 1), (4, 2), (2, 4)])
def test_the_engine_trains_what_a_loop_by_hand_trains(batch_size: int, accumulation: int, tmp_path: Path) -> None:
    job = victim.make_job(loss=plain_loss, data=FixedSamples(), eval_data=None)
    settings = {"optimizer": "sgd", "schedule": "constant", "lr": 0.1, "weight_decay": 0.0}
    run(tmp_path, job, batch_size=batch_size, accumulation=accumulation, max_steps=5, **settings)
    expected = by_hand(5, 0.1)
    for ours, theirs in zip(job.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_clipping_is_torchs_own(tmp_path: Path) -> None:
    job = victim.make_job(loss=lambda m, b: plain_loss(m, b) * 100, data=FixedSamples(), eval_data=None)
    twin = victim.make_job().model
    settings = {"optimizer": "sgd", "schedule": "constant", "weight_decay": 0.0, "momentum": 0.0}
    run(tmp_path, job, batch_size=44, max_steps=1, lr=1.0, clip_norm=0.5, **settings)
    (plain_loss(twin, (FixedSamples().inputs, FixedSamples().inputs.sum(1) > 0)) * 100).backward()
    torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
    for ours, theirs in zip(job.model.parameters(), twin.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours, theirs - theirs.grad, rtol=1e-4, atol=1e-6)


def test_the_guides_lines_are_there_to_the_letter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_LOG_LEVEL", "DEBUG")
    _, told = run(tmp_path, epochs=1, batch_size=4)
    assert "Batch size: 4 (expected: 4)\n" in told
    assert re.search(r"^Epoch time: \d+s \([\d.]+ samples/sec, [\d.]+ batches/sec\)$", told, re.MULTILINE)
    assert re.search(r"^\[TRAIN PROFILE\] DataLoader avg: \d+\.\dms, max: \d+\.\dms$", told, re.MULTILINE)
    assert len(re.findall(r"samples/s ETA .* loss ", told)) >= 10
    assert epoch_time_line(120, 49440, 384) == "Epoch time: 120s (412 samples/sec, 3.2 batches/sec)"
    assert epoch_time_line(238, 20, 2) == "Epoch time: 238s (0.084 samples/sec, 0.0084 batches/sec)"


def test_the_loader_profile_is_only_for_debugging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINER_LOG_LEVEL", raising=False)
    assert "TRAIN PROFILE" not in run(tmp_path, epochs=1)[1]


def test_the_status_line_stands_beside_the_bar(tmp_path: Path) -> None:
    stream = io.StringIO()
    screen = TrainingScreen(tmp_path, stream=stream)

    def wait_for_a_look(_: StepEnd) -> None:
        # The machine is first looked at beside the training, and these steps may all be over before.
        deadline = time.monotonic() + 60
        while screen.latest is None and time.monotonic() < deadline:
            time.sleep(0.01)

    settings = TrainSettings(device="cpu", epochs=3)
    train(victim.make_job(), settings, tmp_path, screen=screen, on_step=wait_for_a_look)
    assert re.search(r"loss \S+ \| GPU: .* \| VRAM:.* \| CPU: .* \| RAM:", stream.getvalue())


def test_a_second_call_goes_on_and_a_longer_one_trains_on(tmp_path: Path) -> None:
    first, _ = run(tmp_path, epochs=1, batch_size=8)
    again, told = run(tmp_path, epochs=1, batch_size=8)
    assert (first.steps, again.steps) == (6, 6)
    assert f"Resuming from {tmp_path}/checkpoints/step-00000006 (step 6, after epoch 1)" in told
    more, told = run(tmp_path, epochs=2, batch_size=4)
    assert more.steps == 6 + 11
    assert "Changed since: epochs 1 → 2, batch_size 8 → 4" in told


def test_another_batch_size_in_the_middle_of_an_epoch_uses_each_sample_once(tmp_path: Path) -> None:
    used: dict[int, list[int]] = {}

    def note(end: StepEnd) -> None:
        if end.step == 4 and end.state.settings.batch_size == 8:
            raise victim.Interrupted  # the third step is saved
        used[end.step] = [int(number) for number in re.findall(r"\d+", end.samples)]

    settings: dict[str, Any] = {"device": "cpu", "save_every": 3, "epochs": 1, "record": False}
    quiet = {"screen": TrainingScreen(tmp_path, speaks=False), "on_step": note}
    with pytest.raises(victim.Interrupted):
        train(victim.make_job(), TrainSettings(**settings, batch_size=8), tmp_path, **quiet)  # type: ignore[arg-type]
    train(victim.make_job(), TrainSettings(**settings, batch_size=5), tmp_path, **quiet)  # type: ignore[arg-type]
    assert [len(ids) for ids in used.values()] == [8, 8, 8, 5, 5, 5, 5]
    assert sorted(index for ids in used.values() for index in ids) == list(range(44))


def test_a_resume_says_that_the_data_has_changed(tmp_path: Path) -> None:
    """Seen to fail: a picture was taken out, and the run went on within its epoch without a word."""

    def told(samples: int, **asked: int) -> str:
        stream = io.StringIO()
        screen = TrainingScreen(tmp_path, stream=stream, sampled=False)
        settings = TrainSettings(device="cpu", batch_size=8, record=False, **asked)  # type: ignore[arg-type]
        train(victim.make_job(data=victim.NoisySamples(samples)), settings, tmp_path, screen=screen)
        return stream.getvalue()

    told(40, epochs=1, max_steps=2)
    within = told(39, epochs=1)
    assert "samples 40 → 39" in within
    assert "the rest of epoch 1 is drawn from the changed data" in within
    after = told(44, epochs=2)
    assert "samples 39 → 44" in after
    assert "changed data" not in after
    assert "samples" not in told(44, epochs=3).partition("Epoch")[0]


def test_fresh_sets_the_old_checkpoints_aside(tmp_path: Path) -> None:
    run(tmp_path, epochs=1)
    stream = io.StringIO()
    screen = TrainingScreen(tmp_path, stream=stream, sampled=False)
    train(victim.make_job(), TrainSettings(device="cpu", epochs=1, record=False), tmp_path, screen=screen, fresh=True)
    assert "Resuming" not in stream.getvalue()
    assert checkpoint.folders(tmp_path / "checkpoints.old-1")
    for name in ("metrics.csv", "metrics.old-1.csv"):  # neither run is in the other's history, each with its header
        assert [line.split(",")[0] for line in (tmp_path / name).read_text().splitlines()] == ["epoch", "1"]


def test_the_best_checkpoint_stays(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path, epochs=6, lr=0.5, keep_last=1, keep_best=1, monitor="loss", monitor_mode="min")
    kept = [checkpoint.verify(folder) for folder in checkpoint.folders(tmp_path / "checkpoints")]
    assert len(kept) <= 2
    assert outcome.best in {one.metric for one in kept}


def test_stages_and_unfreezing(tmp_path: Path) -> None:
    stages = (
        Stage("head", 1, lr=0.1, frozen=("first.*", "norm.*")),
        Stage("all", 2, lr=0.01, batch_size=4, frozen=("first.*",), unfreeze=((1, "first.*"),)),
    )
    trained: dict[int, set[str]] = {}
    rates: dict[int, float] = {}

    def note(end: StepEnd) -> None:
        names = {name for name, p in end.state.model.named_parameters() if p.requires_grad}
        trained[end.epoch] = {name.split(".")[0] for name in names}
        rates[end.epoch] = max(rates.get(end.epoch, 0.0), end.state.stepper.optimizer.param_groups[0]["lr"])

    job = victim.make_job(stages=stages)
    screen = TrainingScreen(tmp_path, speaks=False)
    outcome = train(job, TrainSettings(device="cpu", batch_size=8), tmp_path, screen=screen, on_step=note)
    assert trained == {0: {"last"}, 1: {"norm", "last"}, 2: {"first", "norm", "last"}}
    assert rates[0] == 0.1
    assert rates[1] == 0.01
    assert outcome.steps == 6 + 11 + 11


def test_ready_batches_and_their_resume(tmp_path: Path) -> None:
    inputs = FixedSamples().inputs
    batches = [(inputs[i : i + 4], inputs[i : i + 4].sum(1) > 0) for i in range(0, 44, 4)]
    hashes: dict[int, str] = {}

    def job() -> Job:
        return victim.make_job(data=iter_again(batches), eval_data=None)

    def note(end: StepEnd) -> None:
        assert hashes.setdefault(end.step, victim.fingerprint(end)) == victim.fingerprint(end)

    def until_7(end: StepEnd) -> None:
        note(end)
        if end.step == 7:
            raise victim.Interrupted

    settings = TrainSettings(device="cpu", epochs=2, save_every=5, record=False)
    train(job(), settings, tmp_path / "whole", screen=TrainingScreen(tmp_path, speaks=False), on_step=note)
    with pytest.raises(victim.Interrupted):
        train(job(), settings, tmp_path / "cut", screen=TrainingScreen(tmp_path, speaks=False), on_step=until_7)
    train(job(), settings, tmp_path / "cut", screen=TrainingScreen(tmp_path, speaks=False), on_step=note)
    assert len(hashes) == 22


class iter_again:
    """An iterable of batches that is no sequence."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


@pytest.mark.parametrize(
    ("changes", "settings", "words"),
    [
        ({"data": []}, {}, "the data set is empty"),
        ({"data": 5}, {}, "neither a data set nor an iterable"),
        ({"data": (x for x in ())}, {}, "the end of an epoch is not known"),
        ({}, {"batch_size": 100, "drop_last": True}, "smaller than one batch"),
        ({}, {"device": "cuda"}, "torch sees no GPU"),
        ({}, {"gradient_checkpointing": True}, "does not offer it"),
        ({}, {"optimizer": "adamw8bit"}, "bitsandbytes"),
    ],
)
def test_mistakes_are_told_before_step_0(
    changes: dict[str, Any], settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    if settings.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UsageError, match=words):
        run(tmp_path, victim.make_job(**changes), **settings)


def test_two_runs_cannot_write_into_the_same_folder(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with checkpoint.claim(tmp_path).locked("busy"):
            os.write(writing, b"held")
            time.sleep(60)
        os._exit(0)
    try:
        os.read(reading, 4)
        with pytest.raises(UsageError, match="another training uses"):
            run(tmp_path, epochs=1)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    run(tmp_path, epochs=1)  # a killed run holds nothing


def test_metrics_are_logged_as_csv(tmp_path: Path) -> None:
    run(tmp_path, epochs=2)
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert lines[0] == "epoch,seconds,train_loss,train_accuracy,eval_loss,eval_accuracy"
    assert [line.split(",")[0] for line in lines[1:]] == ["1", "2"]


def test_bf16_on_the_cpu(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path, epochs=2, precision="bf16", channels_last=True)
    assert outcome.skipped_steps == 0


def test_the_rate_falls_to_the_end_of_a_run_that_max_steps_does_not_cut(tmp_path: Path) -> None:
    rates: list[float] = []

    def note(end: StepEnd) -> None:
        rates.append(end.state.stepper.optimizer.param_groups[0]["lr"])

    settings = TrainSettings(batch_size=22, epochs=2, max_steps=1000, device="cpu", record=False)
    train(victim.make_job(eval_data=None), settings, tmp_path, on_step=note)
    assert len(rates) == 4
    assert rates[-1] == 0.0


def test_batches_are_not_kept_until_their_figures_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = [0]

    def loss(model: Any, batch: Any) -> torch.Tensor:
        alive.add(batch[0])
        return plain_loss(model, batch)

    monkeypatch.setattr(AsyncMetrics, "read", lambda self, everything: ())
    train(
        victim.make_job(loss=loss, data=FixedSamples(), eval_data=None),
        TrainSettings(batch_size=4, device="cpu", record=False),
        tmp_path,
        on_step=lambda _: most.append(len(alive)),
    )
    assert max(most) <= 2


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": lambda m, s, d: torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=np.float64(1e-4))},
        {"made_from": {"data": Path("/x")}},
    ],
)
def test_what_cannot_be_saved_is_told_before_step_0(changes: dict[str, Any], tmp_path: Path) -> None:
    steps: list[StepEnd] = []
    settings = TrainSettings(device="cpu", record=False)
    with pytest.raises(UsageError, match="cannot save"):
        train(victim.make_job(**changes), settings, tmp_path, on_step=steps.append)
    assert not steps


def test_nothing_outside_of_the_run_stays_changed(tmp_path: Path) -> None:
    job = victim.make_job()
    job.model.eval()

    def seen() -> tuple[object, ...]:
        strict = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
        grads = [parameter.grad for parameter in job.model.parameters()]
        return *strict, job.model.training, grads, random.getstate(), torch.get_rng_state().tolist()

    before = seen()
    run(tmp_path, job, deterministic=True)
    assert seen() == before


def test_a_rollback_goes_to_the_checkpoint_that_the_first_rank_chose(tmp_path: Path) -> None:
    chosen = checkpoint.Checkpoint(tmp_path / "step-00000001", 1, 1, None)
    loaded: list[Path] = []

    def load(folder: Path) -> None:
        loaded.append(folder)
        raise UsageError("enough")

    group = SimpleNamespace(first=False, barrier=lambda: None, gather=lambda _: [chosen, None])
    state = SimpleNamespace(group=group, root=tmp_path, load=load, parts=dict, model=None)
    loop: Any = SimpleNamespace(state=state, _wait_for_disk=lambda: None)
    with pytest.raises(UsageError, match="enough"):
        Loop._roll_back(loop, "a spike")
    assert loaded == [chosen.folder]
