"""Stages: which parameters move, in which batches, by which optimizer, from an epoch on."""

from __future__ import annotations

import inspect

import torch

from fulltilt.errors import UsageError
from fulltilt.train import optimizers
from fulltilt.train.rig import Rig
from fulltilt.train.schedule import Stage, stage_at, stage_rate, trainable


def enter_stage(rig: Rig, epoch: int) -> None:
    """Set up the stage that ``epoch`` lies in: optimizer, batch, and which parameters move in this epoch."""
    index, epoch_in_stage = stage_at(rig.stages, epoch)
    stage = rig.stages[index]
    named = dict(rig.model.named_parameters())
    names = frozenset(trainable(named, stage, epoch_in_stage, rig.brought_frozen))
    thawed = names != rig.trained
    if thawed:
        if not names:
            raise UsageError(_nothing_moves(stage, has_parameters=bool(named)))
        for name, parameter in named.items():
            parameter.requires_grad_(name in names)
    if index != rig.stage_index:
        settings = rig.settings
        accumulation = stage.accumulation or settings.accumulation
        rig.source = rig.source.resized(stage.batch_size or settings.batch_size, accumulation)
        if rig.stage_index < 0 or stage.fresh_optimizer:
            rig.stepper.optimizer = _optimizer(rig)
        if rig.job.on_stage is not None:
            rig.job.on_stage(stage, rig.model)
    if index != rig.stage_index or thawed:
        rig.stepper.use(rig.stepper.optimizer)
    rig.stage_index, rig.trained = index, names


def learning_rate_of(rig: Rig) -> float:
    """The rate of the next step, before the factors of the optimizer's groups."""
    settings, stages, progress = rig.settings, rig.stages, rig.progress
    index, epoch_in_stage = stage_at(stages, progress.epoch)
    per_epoch = rig.source.steps_per_epoch()
    if settings.max_steps is not None and (len(stages) == 1 or per_epoch is None):
        return stage_rate(settings, stages[index], progress.step, settings.max_steps, per_epoch or 0)
    assert per_epoch is not None
    step = epoch_in_stage * per_epoch + rig.source.steps_done(progress.consumed)
    return stage_rate(settings, stages[index], step, stages[index].epochs * per_epoch, per_epoch)


def last_trained_epoch(epoch: int, consumed: int) -> int:
    """The epoch whose stage the optimizer of a checkpoint belongs to: a new stage begins with its first step."""
    return epoch - 1 if epoch and not consumed else epoch


def _optimizer(rig: Rig) -> torch.optim.Optimizer:
    make = rig.job.optimizer or optimizers.build
    made = make(rig.model, rig.settings, rig.device)
    if not isinstance(made, torch.optim.Optimizer):
        raise UsageError(f"optimizer(model, settings, device) returned {type(made).__name__}, which is no optimizer")
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"{type(made).__name__} asks for the loss several times a step through a closure; the engine has none",
            "Take one that steps without a closure, such as AdamW or SGD.",
        )
    optimizers.note_rates(made, rig.settings.lr)
    return made


def _nothing_moves(stage: Stage, *, has_parameters: bool) -> str:
    if not has_parameters:
        return "the model has no parameters, so there is nothing to train"
    return f"stage {stage.name}: all parameters of the model are frozen, so there is nothing to train"
