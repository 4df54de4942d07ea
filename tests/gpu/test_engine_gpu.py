"""The engine on a real GPU: no waiting on the hot path, exact resume, real out-of-memory, every precision."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fulltilt.train import checkpoint, random_states
from fulltilt.train.config import TrainSettings
from fulltilt.train.guards import StepFigures
from fulltilt.train.job import Job
from fulltilt.train.loop import train
from fulltilt.train.progress import TrainingScreen
from fulltilt.train.random_states import restore_rng, rng_state
from fulltilt.train.train_state import StepEnd
from tests.faults import victim

pytestmark = pytest.mark.gpu


class Kept(TrainingScreen):
    """A silent screen that keeps the figures of each step."""

    def __init__(self, out: Path) -> None:
        super().__init__(out, speaks=False)
        self.figures: list[StepFigures] = []
        self.warnings: list[str] = []

    def step(self, figures: StepFigures, samples: int) -> None:
        self.figures.append(figures)

    def warn(self, line: str) -> None:
        self.warnings.append(line)


class OnDevice:
    """Batches that lie on the GPU already."""

    def __init__(self, steps: int, batch: int = 16, width: int = 6) -> None:
        generator = torch.Generator("cuda").manual_seed(3)
        self.batches = [
            (torch.randn(batch, width, device="cuda", generator=generator), torch.arange(batch, device="cuda") % 2 == 0)
            for _ in range(steps)
        ]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def run(out: Path, job: Job, on_step: Any = None, **settings: Any) -> Kept:
    screen = Kept(out)
    chosen = {"device": "cuda", "lr": 1e-2, **settings}
    train(job, TrainSettings(**chosen), out, screen=screen, on_step=on_step)
    return screen


def quiet_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return torch.nn.functional.binary_cross_entropy_with_logits(model(batch[0]).float(), batch[1].float())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_step_never_waits_for_the_gpu(precision: str, tmp_path: Path) -> None:
    """torch raises at every synchronising call between the third step and the last."""

    def strict_from_step_3(end: StepEnd) -> None:
        torch.cuda.set_sync_debug_mode("error" if 3 <= end.step < 19 else "default")

    job = Job(model=victim.Net(), loss=quiet_loss, data=OnDevice(20))
    try:
        screen = run(tmp_path, job, strict_from_step_3, precision=precision, clip_norm=1.0, ema_decay=0.9)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(screen.figures) == 20


def test_a_bad_step_is_skipped_on_the_device(tmp_path: Path) -> None:
    data = OnDevice(12)
    data.batches[5][0].fill_(float("nan"))
    job = Job(model=victim.Net(), loss=quiet_loss, data=data)
    screen = run(tmp_path, job, precision="fp32")
    assert [figures.step for figures in screen.figures if figures.bad] == [6]
    assert any("step 6 was skipped" in line for line in screen.warnings)
    assert all(torch.isfinite(parameter).all() for parameter in job.model.parameters())


@pytest.mark.parametrize(("precision", "forgotten"), [("fp32", None), ("bf16", None), ("fp16", None), ("fp32", "cuda")])
def test_resume_is_exact_and_needs_the_gpus_random_state(
    precision: str, forgotten: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chains: list[dict[int, str]] = []

    def once(out: Path, stop_at: int | None) -> None:
        hashes: dict[int, str] = {}
        chains.append(hashes)

        def note(end: StepEnd) -> None:
            digest = [p.detach().float().cpu().numpy().tobytes() for p in end.state.model.parameters()]
            hashes[end.step] = str(hash(tuple(digest)))
            if end.step == stop_at:
                raise victim.Interrupted

        job = victim.make_job(loss=drop_out_loss)
        try:
            run(out, job, note, precision=precision, epochs=2, batch_size=8, save_every=4, deterministic=True)
        except victim.Interrupted:
            pass

    once(tmp_path / "whole", None)
    once(tmp_path / "cut", 7)
    if forgotten is not None:
        restore = restore_rng
        monkeypatch.setattr(
            random_states,
            "restore_rng",
            lambda states, device: restore({**states, forgotten: rng_state(device)[forgotten]}, device),
        )
    once(tmp_path / "cut", None)
    whole, first, second = chains
    assert min(second) > 4  # it went on from a checkpoint: after the fourth step, or at the end of an epoch
    assert ({**first, **second} == whole) == (forgotten is None)


def drop_out_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Dropout draws from the GPU's own generator."""
    return quiet_loss(model, batch)


def test_a_real_out_of_memory_is_survived(tmp_path: Path) -> None:
    """The memory of the process is cut to two thirds of what the step needs; the loss curve stays the same."""

    def wide() -> torch.nn.Module:
        torch.manual_seed(0)
        layers = [layer for _ in range(8) for layer in (torch.nn.Linear(1024, 1024), torch.nn.GELU())]
        return torch.nn.Sequential(*layers, torch.nn.Linear(1024, 1), torch.nn.Flatten(0))

    data = OnDevice(6, batch=65536, width=1024)
    settings = {"precision": "fp32", "tf32": False, "schedule": "constant", "lr": 1e-4}
    gc.collect()  # what earlier tests left, or the tight run has its room too
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    resting = torch.cuda.memory_allocated()
    roomy = run(tmp_path / "roomy", Job(model=wide(), loss=quiet_loss, data=data), **settings)
    peak = torch.cuda.max_memory_allocated()
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    room = torch.cuda.memory_allocated() + 0.66 * (peak - resting)
    torch.cuda.set_per_process_memory_fraction(room / total)
    try:
        tight = run(tmp_path / "tight", Job(model=wide(), loss=quiet_loss, data=data), **settings)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    told = f"{resting:,} bytes at rest, {peak:,} at most, {room:,.0f} allowed"
    assert any("memory ran out" in line for line in tight.warnings), told
    for a, b in zip(roomy.figures, tight.figures, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-4)


def test_a_background_checkpoint_holds_the_state_of_its_step(tmp_path: Path) -> None:
    """The steps after the save must not reach into what is being written."""
    kept: dict[int, list[torch.Tensor]] = {}

    def note(end: StepEnd) -> None:
        if end.step % 5 == 0:
            kept[end.step] = [p.detach().clone() for p in end.state.model.parameters()]

    job = Job(model=victim.Net(), loss=quiet_loss, data=OnDevice(20))
    run(tmp_path, job, note, save_every=5, keep_last=9, precision="fp32")
    names = [name for name, _ in job.model.named_parameters()]
    for step, tensors in kept.items():
        saved = checkpoint.load(tmp_path / "checkpoints" / checkpoint.folder_name(step))[0]
        assert all(torch.equal(saved[name], t.cpu()) for name, t in zip(names, tensors, strict=True))


def test_compiled_and_channels_last(tmp_path: Path) -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(0)
    )
    images = [(torch.randn(4, 3, 16, 16, device="cuda"), torch.ones(32, device="cuda")) for _ in range(6)]

    class Images(OnDevice):
        def __init__(self) -> None:
            self.batches = images

    job = Job(model=model, loss=quiet_loss, data=Images(), splittable=False)
    screen = run(tmp_path, job, compile=True, channels_last=True, precision="bf16")
    assert len(screen.figures) == 6
    assert not any(figures.bad for figures in screen.figures)
