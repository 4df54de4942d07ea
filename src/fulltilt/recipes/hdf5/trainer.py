"""The hdf5 recipe as a Job: loaders, network, loss and metrics."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fulltilt import feed
from fulltilt.feed.augment import Pipeline, SpecAugment
from fulltilt.feed.hdf5 import Hdf5Loader
from fulltilt.feed.staging import stage_dir
from fulltilt.figures import count
from fulltilt.probes.host import cpu_capacity
from fulltilt.recipes.hdf5 import Hdf5Options
from fulltilt.recipes.hdf5.data import FileShare, Hdf5Data, keys_of, read_folder
from fulltilt.recipes.hdf5.model import WindowNet, binary_loss
from fulltilt.recipes.recipe import Request
from fulltilt.train.distributed import device_of, rank_from_env
from fulltilt.train.job import Job
from fulltilt.train.progress import TrainingScreen
from fulltilt.train.random_states import seed_everything


def check(request: Request) -> None:
    """Check the files and every label. Raises UsageError, DataError."""
    read_folder(request.data, request.options)


def run(request: Request) -> Mapping[str, float]:
    """Train and return the last metrics."""
    options: Hdf5Options = request.options
    screen = TrainingScreen(request.out, speaks=rank_from_env().rank == 0, sampled=options.profile_gpu_util)
    screen.debugging = screen.debugging and options.profile_performance
    with contextlib.ExitStack() as cleanup:
        folder = _staged(request, screen, cleanup)
        found = read_folder(folder, options)
        data = cleanup.enter_context(reader(request, found.train, training=True))
        eval_data = cleanup.enter_context(reader(request, found.validation, training=False))
        screen.say(_described(found, data))
        return request.train(build(request, found, data, eval_data), screen)


def build(request: Request, found: Hdf5Data, data: Hdf5Loader, eval_data: Hdf5Loader) -> Job:
    """The Job of a request."""
    options: Hdf5Options = request.options
    seed_everything(request.settings.seed)  # the weights are made before the engine seeds
    model = WindowNet(found.feature_count, options.width, options.heads, options.dropout)
    # pos_weight shifts every logit by its logarithm; without it, the threshold is a probability.
    shift = math.log(found.pos_weight) if options.imbalance == "pos_weight" else 0.0

    def measured(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return binary_loss(logits, labels, options.imbalance, found.pos_weight, options.focal_gamma)

    def loss(net: torch.nn.Module, batch: Any) -> torch.Tensor:
        return measured(*_logits(net, batch))

    def eval_loss(net: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, Any], dict[str, torch.Tensor]]:
        logits, labels = _logits(net, batch)
        return measured(logits, labels), {}, {"logits": logits - shift, "labels": labels}

    def eval_metrics(kept: dict[str, torch.Tensor]) -> dict[str, float]:
        return summary(kept["logits"], kept["labels"])

    return Job(model, loss, data, eval_data=eval_data, eval_loss=eval_loss, eval_metrics=eval_metrics, name="hdf5")


def reader(request: Request, part: FileShare, *, training: bool) -> Hdf5Loader:
    """The loader of training or validation files."""
    options: Hdf5Options = request.options
    settings, info = request.settings, rank_from_env()
    keys = keys_of(options)
    size = settings.batch_size if training else settings.eval_batch_size or settings.batch_size
    spec = Pipeline([SpecAugment(fill=None)], image=0) if training and options.use_specaugment else None
    return feed.hdf5(
        part.files,
        keys,
        max(size // info.world_size, 1),
        window=options.window,
        stride=options.stride,
        window_keys=keys[:-1] if options.window else None,
        part=part.rows,
        augment=spec,
        residency=settings.residency,
        shuffle=training,
        drop_last=training and settings.drop_last,
        seed=settings.seed,
        device=device_of(settings.device, info.local_rank),
        rank=info.rank,
        world_size=info.world_size,
        num_workers=min(settings.workers, int(cpu_capacity().usable)) // info.world_size,
    )


def _staged(request: Request, screen: TrainingScreen, cleanup: contextlib.ExitStack) -> Path:
    """The folder to read: the data's own, or a copy in ``stage_dir`` if that pays."""
    options: Hdf5Options = request.options
    if options.stage_dir is None or not request.data.is_dir():
        return request.data
    with reader(request, read_folder(request.data, options).train, training=True) as planned:
        resident = planned.tier != "none"
    # What stays in memory is read once, whatever the number of epochs.
    staged = stage_dir(request.data, options.stage_dir, epochs=1 if resident else request.settings.epochs)
    cleanup.enter_context(staged)
    screen.say(f"Staged to {staged.path}: {staged.reason}" if staged.staged else f"Not staged: {staged.reason}")
    return staged.path


def _described(found: Hdf5Data, data: Hdf5Loader) -> str:
    share = found.positives / (found.positives + found.negatives)
    files = count("file", len(found.train.files))
    kept = "streamed in blocks" if data.tier == "none" else f"kept in {data.tier}"
    return f"{data.source.samples:,} training windows from {files}, {100 * share:.1f} % positive, {kept}"


def _logits(net: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The network's logits and the labels; several keys are concatenated along their features."""
    *features, labels = batch
    parts = [part.float() for part in features]
    return net(parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)), labels.reshape(len(labels))


# --------------------------------------------------------------------------- metrics


def summary(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """AUROC, average precision, the best F1 and its threshold; nothing without both classes or finite scores."""
    scores, order = torch.sort(logits.double(), descending=True, stable=True)
    truth = labels.double()[order]
    hits, alarms = truth.cumsum(0), (1 - truth).cumsum(0)
    if not len(truth) or not float(hits[-1]) or not float(alarms[-1]) or not bool(torch.isfinite(logits).all()):
        return {}
    # Only the last of equal scores is a threshold.
    last = torch.ones_like(truth, dtype=torch.bool)
    last[:-1] = scores.diff() != 0
    scores, hits, alarms = scores[last], hits[last], alarms[last]
    zero = hits.new_zeros(1)
    recall, false_alarm = (torch.cat([zero, counts]) / counts[-1] for counts in (hits, alarms))
    precision = hits / (hits + alarms)
    f1 = 2 * hits / (hits[-1] + hits + alarms)
    return {
        "auroc": float(torch.trapezoid(recall, false_alarm)),
        "auprc": float((precision * recall.diff()).sum()),
        "f1": float(f1.max()),
        "threshold": float(torch.sigmoid(scores[f1.argmax()])),
    }
