"""Evaluation: loss and metrics over a data set, every sample once whatever the number of ranks."""

from __future__ import annotations

import difflib
import gc
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fulltilt.train.data_source import split_batch, to_device
from fulltilt.train.distributed import Group
from fulltilt.train.guards import RankDoesNotFit, is_out_of_memory
from fulltilt.train.job import plain_metrics, value_and_means
from fulltilt.train.metrics_log import EpochTotals
from fulltilt.train.train_state import TrainState


def evaluate(
    state: TrainState, beat: Callable[[str], None], stopping: Callable[[], bool] = lambda: False
) -> dict[str, float] | None:
    """The metrics by name; ``loss`` is among them. A batch that does not fit is halved and done again.

    None when a rank was ``stopping``: it is asked before every batch.
    """
    assert state.eval_source is not None
    totals = EpochTotals(state.device)
    kept: list[Mapping[str, torch.Tensor]] = []
    was_training = state.model.training
    state.model.eval()
    try:
        # FSDP gathers into memory that it keeps: made in inference mode, it could not be trained with.
        with torch.no_grad() if state.stepper.placement.lockstep else torch.inference_mode():
            for number, step in enumerate(state.eval_source.steps(0, 0)):
                beat(f"evaluating batch {number}")
                if any(state.group.agree([stopping()])):
                    return None
                for batch in step.batches or ([None] if state.stepper.placement.lockstep else []):
                    kept += _add(state, batch, totals)
    finally:
        state.model.train(was_training)
    means = totals.means(state.group)
    if state.job.eval_metrics is not None:
        beat("computing the metrics of the whole set")
        means.update(plain_metrics(state.job.eval_metrics(_joined(kept, state.group))))
    return means


def watched(state: TrainState, found: Mapping[str, float]) -> float | None:
    """The metric that the run goes by, noted in its history; None where it was not measured, which is told.

    It may be misspelt, or undefined for now: a curve over a set with a single class.
    """
    name = state.settings.monitor
    if name is None:
        return None
    metric = found.get(name.removeprefix("eval_"))
    if metric is not None:
        state.history.values.append((state.progress.epoch, metric))
    elif found:
        close = difflib.get_close_matches(name.removeprefix("eval_"), found, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        state.screen.warn(f"monitor: {name} was not measured, only {', '.join(found)}{hint}")
    return metric


def _joined(kept: list[Mapping[str, torch.Tensor]], group: Group) -> dict[str, torch.Tensor]:
    mine = {name: torch.cat([rows[name] for rows in kept]) for name in (kept[0] if kept else ())}
    if group.alone:
        return mine
    parts = [part for part in group.gather({name: rows.cpu() for name, rows in mine.items()}) if part]
    return {name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else ())}


def _add(state: TrainState, batch: Any, totals: EpochTotals) -> list[Mapping[str, torch.Tensor]]:
    """Add a batch's means to ``totals`` and return what is to be kept of its samples. None is no batch."""
    placement, loss = state.stepper.placement, state.job.eval_loss or state.job.loss
    while True:
        found: list[tuple[dict[str, torch.Tensor], int]] = []
        kept: list[Mapping[str, torch.Tensor]] = []
        running, failed_at = 0, 0
        try:
            own = [] if batch is None else list(split_batch(batch, state.eval_micro.most))
            for piece, running in placement.pieces(own):
                on_device = to_device(piece, state.device, state.stepper.memory_format)
                with state.precision.context():
                    outcome = placement.evaluate(loss, on_device)
                value, metrics, rows = value_and_means(outcome, state.device)
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
        if state.device.type == "cuda":
            torch.cuda.empty_cache()
        state.eval_micro.halve(failed_at, "in evaluation")
    for means, count in found:
        totals.add(means, count)
    return kept
