"""Live tuning against an exhaustive sweep over worker counts: COD and CLIP from JPEG files, one process.

For each job: the DataLoader with each number of workers for a few seconds (the sweep), then one training run from 0
workers under live tuning. Told are its rate in the last seconds against the sweep's best, when it first came within
95 % of it, and what tuning cost: time of the training thread, and of trials slower than the settings before.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from feedbench.images import Segmenter, StockImages, make_images
from feedbench.measuring import Step, trainer
from torch import nn
from torch.utils.data import DataLoader

from fulltilt import store
from fulltilt.timeline.session import Session
from fulltilt.tune.live import Live

POINT_S, LIVE_S, LAST_S = 6.0, 75.0, 12.0
FIRST_MINUTES_S = 300.0
NEAR = 0.95


class Job(NamedTuple):
    name: str
    data: Endless
    batch_size: int
    step: Step


class Endless(StockImages):
    """Files over and over in one pass; each is flipped or not by its number, so that no random number is drawn."""

    pause_s = 0.0

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        from torchvision.transforms.v2.functional import normalize

        number = index % len(self.files)
        time.sleep(self.pause_s)
        pixels, other = super(StockImages, self).__getitem__(number)
        pixels = pixels.flip(-1) if number % 2 else pixels
        return normalize(pixels.float() / 255, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]), other


def cod(folder: Path, device: torch.device, smoke: bool) -> Job:
    size, batch_size, count = (64, 4, 24) if smoke else (384, 64, 512)
    files = make_images(folder, count, *((96, 64) if smoke else (800, 600)), masks=True)
    model = (nn.Conv2d(3, 1, 3, padding=1) if smoke else Segmenter("edgenext_base")).to(device)

    def loss_of(network: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(network(batch[0]).float(), (batch[1] > 127).float())

    return Job("cod", Endless(files, size), batch_size, trainer(model, loss_of, device))


def clip(folder: Path, device: torch.device, smoke: bool) -> Job:
    from transformers import CLIPConfig, CLIPModel

    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**small, "image_size": 32, "patch_size": 16}
    config = CLIPConfig(text_config=small, vision_config=vision, projection_dim=16) if smoke else CLIPConfig()
    size, batch_size, count = (32, 4, 24) if smoke else (224, 256, 1024)
    files = make_images(folder, count, *((48, 48) if smoke else (400, 300)), masks=False)
    model = CLIPModel(config).to(device)

    def loss_of(network: nn.Module, batch: Any) -> torch.Tensor:
        return network(input_ids=batch[1], pixel_values=batch[0], return_loss=True).loss

    return Job("clip", Endless(files, size), batch_size, trainer(model, loss_of, device))


def train(job: Job, workers: int, device: torch.device, seconds: float) -> Iterator[float]:
    """Train for so long; yields the moment at which each batch was done, the queue of the GPU drained now and then."""
    loader = DataLoader(
        job.data,
        job.batch_size,
        shuffle=False,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        persistent_workers=workers > 0,
    )
    began_s = time.perf_counter()
    for number, batch in enumerate(loader):
        job.step([part.to(device, non_blocking=True) for part in batch])
        if device.type == "cuda" and number % 16 == 0:
            torch.cuda.synchronize()
        now_s = time.perf_counter() - began_s
        yield now_s
        if now_s > seconds:
            return


def rate_of(moments: list[float], since_s: float) -> float:
    """Batches a second from a moment on."""
    late = [moment for moment in moments if moment >= since_s]
    return (len(late) - 1) / (late[-1] - late[0]) if len(late) > 2 else 0.0


def measure(job: Job, session: Session, device: torch.device, counts: list[int], smoke: bool) -> dict[str, Any]:
    point_s, live_s, last_s = (1.5, 25.0, 4.0) if smoke else (POINT_S, LIVE_S, LAST_S)
    job.data[0]  # imports what decodes, which each forked worker would otherwise do for itself
    list(train(job, counts[-1], device, point_s / 2))  # the first steps choose kernels
    sweep = {}
    for workers in counts:
        moments = list(train(job, workers, device, point_s))
        sweep[workers] = job.batch_size * rate_of(moments, point_s / 3)
        print(f"{job.name:<5} {workers:>3} workers  {sweep[workers]:9.1f} samples/s", flush=True)
    live = Live(session)
    session.taps.live = live.begin
    moments = list(train(job, 0, device, live_s))
    session.taps.live = None
    (record,) = [tuner.diary.record() for tuner in live.tuners.values()]
    best = max(sweep.values())
    window_s = last_s / 3
    near = [
        moment
        for moment in moments
        if moment > window_s
        and job.batch_size * rate_of([m for m in moments if m <= moment], moment - window_s) >= NEAR * best
    ]
    reached = job.batch_size * rate_of(moments, moments[-1] - last_s)
    lost_s = _lost_s(record)
    answer = {
        "sweep": sweep,
        "best_workers": max(sweep, key=sweep.__getitem__),
        "best_samples_per_s": best,
        "live_samples_per_s": reached,
        "live_over_best": reached / best,
        "within_95_pct_after_s": near[0] if near else None,
        "tuning_s": record.cost_s,
        "lost_in_trials_s": lost_s,
        "cost_share_of_five_minutes": (record.cost_s + lost_s) / FIRST_MINUTES_S,
        "live": store.encode(record),
    }
    print(
        f"{job.name:<5} live: {record.settings.num_workers} workers, {reached:.1f} samples/s, "
        f"{100 * reached / best:.1f} % of the sweep's best; 95 % after {near[0] if near else float('nan'):.0f} s; "
        f"cost {100 * answer['cost_share_of_five_minutes']:.2f} % of five minutes",
        flush=True,
    )
    return answer


def _lost_s(record: Any) -> float:
    """What slower trials cost: the time that the settings before would have needed less for the same batches."""
    best = record.before_batches_per_s or 0.0
    lost_s = 0.0
    ends = [move.began_s for move in record.moves[1:]]
    for move, ended_s in zip(record.moves, ends, strict=False):
        if move.batches_per_s is not None:
            lost_s += (ended_s - move.began_s) * max(1 - move.batches_per_s / best, 0.0)
            best = max(best, move.batches_per_s)
    return lost_s


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """Both jobs; about five minutes on an H200 with 16 CPUs."""
    smoke = arguments.smoke or not torch.cuda.is_available()
    device = torch.device("cpu" if smoke else "cuda")
    cpus = len(os.sched_getaffinity(0))
    counts = [0, 1, 2] if smoke else sorted({max(cpus * part // 16, 1) for part in (4, 6, 8, 10, 12, 14, 16)})
    if smoke:
        torch.set_num_threads(1)
    jobs: list[Callable[[Path, torch.device, bool], Job]] = [cod, clip]
    folder = Path(tempfile.mkdtemp(prefix="fulltilt-tune-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    session = Session(torch, folder, time.perf_counter_ns())
    session.install()
    try:
        answer: dict[str, Any] = {}
        for make in jobs:
            (folder / make.__name__).mkdir()
            job = make(folder / make.__name__, device, smoke)
            job.data.pause_s = 0.004 if smoke else 0.0
            answer[job.name] = measure(job, session, device, counts, smoke)
        return answer
    finally:
        session.finish()
        shutil.rmtree(folder, ignore_errors=True)
