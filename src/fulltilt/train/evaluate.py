"""Evaluation: loss and metrics over a data set, every sample once whatever the number of ranks."""

from __future__ import annotations

import difflib
import gc
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fulltilt.train import batches
from fulltilt.train.distributed import Group
from fulltilt.train.loss_value import plain_metrics, value_and_means
from fulltilt.train.rig import Rig
from fulltilt.train.step import RankDoesNotFit, is_out_of_memory
from fulltilt.train.totals import Totals


def evaluate(
    rig: Rig, beat: Callable[[str], None], stopping: Callable[[], bool] = lambda: False
) -> dict[str, float] | None:
    """The metrics by name; ``loss`` is among them. A batch that does not fit is halved and done again.

    None when a rank was ``stopping``: it is asked before every batch.
    """
    assert rig.eval_source is not None
    totals = Totals(rig.device)
    kept: list[Mapping[str, torch.Tensor]] = []
    was_training = rig.model.training
    rig.model.eval()
    try:
        # FSDP gathers into memory that it keeps: made in inference mode, it could not be trained with.
        with torch.no_grad() if rig.stepper.placement.lockstep else torch.inference_mode():
            for number, step in enumerate(rig.eval_source.steps(0, 0)):
                beat(f"evaluating batch {number}")
                if any(rig.group.agree([stopping()])):
                    return None
                for batch in step.batches or ([None] if rig.stepper.placement.lockstep else []):
                    kept += _add(rig, batch, totals)
    finally:
        rig.model.train(was_training)
    means = totals.means(rig.group)
    if rig.job.eval_metrics is not None:
        beat("computing the metrics of the whole set")
        means.update(plain_metrics(rig.job.eval_metrics(_joined(kept, rig.group))))
    return means


def watched(rig: Rig, found: Mapping[str, float]) -> float | None:
    """The metric that the run goes by, noted in its history; None where it was not measured, which is told.

    It may be misspelt, or undefined for now: a curve over a set with a single class.
    """
    name = rig.settings.monitor
    if name is None:
        return None
    metric = found.get(name.removeprefix("eval_"))
    if metric is not None:
        rig.history.add(rig.progress.epoch, metric)
    elif found:
        close = difflib.get_close_matches(name.removeprefix("eval_"), found, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        rig.screen.warn(f"monitor: {name} was not measured, only {', '.join(found)}{hint}")
    return metric


def _joined(kept: list[Mapping[str, torch.Tensor]], group: Group) -> dict[str, torch.Tensor]:
    mine = {name: torch.cat([rows[name] for rows in kept]) for name in (kept[0] if kept else ())}
    if group.alone:
        return mine
    parts = [part for part in group.gather({name: rows.cpu() for name, rows in mine.items()}) if part]
    return {name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else ())}


def _add(rig: Rig, batch: Any, totals: Totals) -> list[Mapping[str, torch.Tensor]]:
    """Add a batch's means to ``totals`` and return what is to be kept of its samples. None is no batch."""
    placement, loss = rig.stepper.placement, rig.job.eval_loss or rig.job.loss
    while True:
        found: list[tuple[dict[str, torch.Tensor], int]] = []
        kept: list[Mapping[str, torch.Tensor]] = []
        running, failed_at = 0, 0
        try:
            own = [] if batch is None else list(batches.split(batch, rig.eval_micro.most))
            for piece, running in placement.pieces(own):
                on_device = batches.to_device(piece, rig.device, rig.stepper.memory_format)
                with rig.precision.context():
                    outcome = placement.evaluate(loss, on_device)
                value, metrics, rows = value_and_means(outcome, rig.device)
                if running:
                    found.append(({"loss": value, **metrics}, running))
                    kept += rows
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failed_at = max(running, 1)
            if placement.lockstep:
                what = f"memory ran out in evaluation with {failed_at} samples at once"
                raise RankDoesNotFit(what, "Lower eval_batch_size; the run resumes.") from error
        if not failed_at:
            break
        # Only now are the frames of the failed attempt gone, and with them what they held.
        gc.collect()
        if rig.device.type == "cuda":
            torch.cuda.empty_cache()
        rig.eval_micro.halve(failed_at, "in evaluation")
    for means, count in found:
        totals.add(means, count)
    return kept
