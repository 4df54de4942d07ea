"""A training on a real GPU as a run of Fulltilt: the ledger closes, copies and memory are seen, the lines are there."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fulltilt
from fulltilt import store
from fulltilt.diagnosis import answer
from fulltilt.train.config import TrainSettings
from fulltilt.train.job import Job
from fulltilt.train.loop import train
from fulltilt.train.progress import TrainingScreen

pytestmark = pytest.mark.gpu


class Pictures:
    """Samples of 200 kB made on the fly, so that data, copies and compute all take their part."""

    def __len__(self) -> int:
        return 2048

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 128, 128), float(index)), index % 10


def network() -> torch.nn.Module:
    layers: list[torch.nn.Module] = [torch.nn.Conv2d(3, 64, 3, stride=2)]
    for _ in range(6):
        layers += [torch.nn.BatchNorm2d(64), torch.nn.ReLU(), torch.nn.Conv2d(64, 64, 3)]
    return torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 10))


def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("residency", ["none", "auto"])
def test_the_ledger_of_a_training_on_a_gpu_closes(residency: str, tmp_path: Path) -> None:
    stream = io.StringIO()
    job = Job(model=network(), loss=loss, data=Pictures(), eval_data=Pictures())
    settings = TrainSettings(batch_size=64, epochs=4, workers=4, residency=residency, save_every=50)  # type: ignore[arg-type]
    train(job, settings, tmp_path, screen=TrainingScreen(tmp_path, stream=stream))
    told = stream.getvalue()
    assert re.search(r"^Using 1 GPU|^GPU 0: ", told, re.MULTILINE)
    assert len(re.findall(r"^GPU Memory - Allocated: \d+\.\d\d GB, Peak: \d+\.\d\d GB$", told, re.MULTILINE)) == 5
    assert re.search(r"\| GPU: \d+% \| VRAM:\d+\.\d/\d+\.\dGB\(\d+\.\d%\) \| CPU: ", told)
    run = store.load(tmp_path)
    found = answer(run)
    ledger = found.ledger
    assert ledger.buckets.total_s == pytest.approx(ledger.wall_s, rel=1e-6)
    assert ledger.buckets.unattributed_s < 0.03 * ledger.wall_s
    assert (found.throughput.steps, found.throughput.samples) == (4 * 32, 4 * 2048)
    assert found.gpu[0].vram_peak_bytes
    assert ledger.buckets.compute_s > 0.0
    assert ledger.buckets.validation_s > 0.0
    peak = run.ranks[0].vram_peak_bytes
    assert peak is not None
    assert peak > 20 * 2**20


def step_on(images: torch.Tensor) -> Callable[[], None]:
    """A training step on a batch that lies on the GPU."""
    model = network().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(images).sum().backward()
        optimizer.step()

    return step


def test_a_graph_that_the_job_records_itself_is_left_alone(tmp_path: Path) -> None:
    """In torch's usual mode any question about an event, on any thread, would ruin the recording."""
    images = torch.randn(16, 3, 64, 64, device="cuda")
    step = step_on(images)
    with fulltilt.record(tmp_path):
        for _ in range(200):  # events are waiting to be asked about
            step()
        graph, doubled = torch.cuda.CUDAGraph(), images.clone()
        with torch.cuda.graph(graph):
            for _ in range(10):
                doubled.mul_(1.01)
                time.sleep(0.1)
        graph.replay()
        for _ in range(20):
            step()
    assert torch.allclose(doubled, images * 1.01**10, rtol=1e-4)
    found = answer(store.load(tmp_path))
    assert found.throughput.steps == 220
    assert found.ledger.buckets.unattributed_s < 0.03 * found.ledger.wall_s


def test_replays_of_a_step_that_the_job_has_captured_whole_are_steps(tmp_path: Path) -> None:
    step = step_on(torch.randn(64, 3, 128, 128, device="cuda"))
    with fulltilt.record(tmp_path):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(11):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        began = time.perf_counter()
        for _ in range(600):
            graph.replay()
        torch.cuda.synchronize()
        replaying_s = time.perf_counter() - began
    found = answer(store.load(tmp_path))
    assert found.throughput.steps == 611
    assert found.ledger.buckets.compute_s > 0.8 * replaying_s
    assert found.ledger.buckets.unattributed_s < 0.03 * found.ledger.wall_s


def test_the_flops_of_a_counted_step_give_mfu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, and backward with a product for weights and one for inputs: the first layer needs none for those."""
    monkeypatch.setattr("fulltilt.recorder.profiler.FIRST_BURST_S", 0.5)
    # What another test compiled in this process would count as compiled here, and FLOPs of that are not counted.
    torch._dynamo.utils.counters.clear()
    width, batch, layers = 4096, 4096, 4
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    inputs = torch.randn(batch, width, device="cuda")
    with fulltilt.record(tmp_path / "run"):
        began = time.perf_counter()
        while time.perf_counter() - began < 4:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(inputs).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            torch.cuda.synchronize()
    used = answer(store.load(tmp_path / "run")).utilisation
    assert used.flops_per_step == pytest.approx(2 * batch * width * width * (3 * layers - 1), rel=0.01)
    assert used.au is not None
    assert used.au > 0.5
    if used.peak_flops_per_s is not None:
        assert used.mfu is not None
        assert 0.05 < used.mfu < 1.0
