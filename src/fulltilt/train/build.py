"""Builds a training before its first step: device, ranks, model, data; enters its stages; resumes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fulltilt.errors import MachineError, StoppedEarly, UsageError
from fulltilt.train import checkpoint, cuda_graphs, optimizers, train_state, weight_import
from fulltilt.train.checkpoint import KeepPolicy, Writer, check_space, newest_complete
from fulltilt.train.config import TrainSettings
from fulltilt.train.data_source import BatchSource, PlannedSource, Source, make_source
from fulltilt.train.distributed import (
    Group,
    LossModule,
    Replicated,
    Sharded,
    SingleProcess,
    device_of,
    divided,
    rank_from_env,
)
from fulltilt.train.job import Job, stage_at, trainable
from fulltilt.train.progress import TrainingScreen
from fulltilt.train.random_states import restore_rng, rng_state, seed_everything
from fulltilt.train.sampler import EpochPlan
from fulltilt.train.step import Stepper, set_tf32
from fulltilt.train.train_state import TrainState, expected_bytes


def recompute(model: torch.nn.Module) -> None:
    """Switch on gradient checkpointing. Raises UsageError for a model without a method for it."""
    for name in ("gradient_checkpointing_enable", "set_grad_checkpointing"):  # Hugging Face, timm
        if callable(switch := getattr(model, name, None)):
            switch()
            return
    raise UsageError(
        f"gradient_checkpointing: {type(model).__name__} does not offer it",
        "Give the model a method gradient_checkpointing_enable(), or leave the setting out.",
    )


# --------------------------------------------------------------------------- stages


def enter_stage(state: TrainState, epoch: int) -> None:
    """Set up the stage of ``epoch``: optimizer, batch size, and which parameters are trained."""
    index, epoch_in_stage = stage_at(state.stages, epoch)
    stage = state.stages[index]
    named = dict(state.model.named_parameters())
    names = frozenset(trainable(named, stage, epoch_in_stage, state.initially_frozen))
    thawed = names != state.trained
    if thawed:
        if not names:
            raise UsageError(f"stage {stage.name}: the model has no parameter that is trained")
        for name, parameter in named.items():
            parameter.requires_grad_(name in names)
    if index != state.stage_index:
        state.source.resize(stage.batch_size or state.settings.batch_size)
        state.stepper.optimizer = _optimizer(state)
        state.guard.recent = []  # a stage may have losses of its own
    if index != state.stage_index or thawed:
        state.stepper.use_trainable()
    state.stage_index, state.trained = index, names


def learning_rate_of(state: TrainState) -> float:
    """The learning rate of the next step, before the factors of the parameter groups."""
    settings, stages, progress = state.settings, state.stages, state.progress
    index, epoch_in_stage = stage_at(stages, progress.epoch)
    stage, per_epoch = stages[index], state.source.steps_per_epoch()
    if settings.max_steps is not None and (len(stages) == 1 or per_epoch is None):
        step, total_steps = progress.step, min(settings.max_steps, stage.epochs * (per_epoch or settings.max_steps))
    else:
        assert per_epoch is not None
        step = epoch_in_stage * per_epoch + state.source.steps_done(progress.consumed)
        total_steps = stage.epochs * per_epoch
    warmed_up = round(settings.warmup_epochs * (per_epoch or 0))
    return optimizers.learning_rate(
        step,
        total_steps=total_steps,
        peak=settings.lr if stage.lr is None else stage.lr,
        floor=settings.min_lr,
        warmup_steps=warmed_up if settings.warmup_steps is None else settings.warmup_steps,
        shape=settings.schedule,
    )


def _optimizer(state: TrainState) -> torch.optim.Optimizer:
    make = state.job.optimizer or optimizers.build
    made = make(state.model, state.settings, state.device)
    if not isinstance(made, torch.optim.Optimizer):
        raise UsageError(
            f"optimizer(model, settings, device) returned {type(made).__name__}, which is not an optimizer"
        )
    for group in made.param_groups:  # the schedule scales all of them together
        group.setdefault("lr_factor", float(group["lr"]) / state.settings.lr)
    return made


# --------------------------------------------------------------------------- building


# For the time limit, until a save has been measured: a slow network disk.
SLOW_DISK_BYTES_PER_S = 100e6


def build(
    job: Job, settings: TrainSettings, out: Path, cleanup: contextlib.ExitStack, screen: TrainingScreen | None = None
) -> TrainState:
    """Build the run, and find everything that can be wrong before step 0. Raises FulltiltErrors.

    What has to be undone at the end, or after an error, goes to ``cleanup``: a notebook goes on after either.
    """
    _check_model(job)
    info = rank_from_env()
    device = device_of(settings.device, info.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    cleanup.enter_context(left_as_found(job.model, device))
    group = Group(info, device, settings.hang_timeout_s)
    cleanup.push(lambda kind, _error, _trace: group.close(failed=kind not in (None, StoppedEarly)))
    policy = KeepPolicy(settings.keep_last, settings.keep_best if settings.monitor else 0, settings.monitor_mode)
    root = out / "checkpoints"
    if group.first:
        cleanup.enter_context(checkpoint.claim(out).locked(f"another training uses {out}"))
        checkpoint.prepare(root)  # only with the lock: unfinished folders could be of a running training
    group.barrier()
    seed_everything(settings.seed)  # the same on every rank: models that draw their weights late must agree
    set_tf32(settings.tf32)
    if settings.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False
    shown = screen or TrainingScreen(out, speaks=group.first)
    stepper = _stepper(job, settings, group, shown, cleanup)

    data, eval_data = _sources(job, settings, group, out, shown, cleanup)
    writer = Writer(root, policy, stepper.placement.saving)
    state = TrainState(job, settings, out, stepper, data, eval_data, writer, shown)
    cleanup.callback(state.unfreeze)
    enter_stage(state, 0)
    state.flattened()  # now, not at the first save, raises the error for what cannot be saved
    size = expected_bytes(job.model, stepper.optimizer, averaged=stepper.ema is not None)
    if group.first:
        check_space(root, size, policy)
    state.writer.longest_save_s = size / SLOW_DISK_BYTES_PER_S  # until one has been measured
    return state


def _sources(
    job: Job,
    settings: TrainSettings,
    group: Group,
    out: Path,
    screen: TrainingScreen,
    cleanup: contextlib.ExitStack,
) -> tuple[Source, Source | None]:
    """The sources of the training's and the evaluation's batches. Raises UsageError for data without a step."""
    info = group.info
    shares = divided(settings.batch_size, settings.workers, info)
    if not group.alone and group.device.type == "cpu":
        screen.say(f"Using {info.world_size} processes on the CPU for training")
    plan = EpochPlan(
        samples=0,
        batch_size=settings.batch_size,
        accumulation=settings.accumulation,
        seed=settings.seed,
        rank=info.rank,
        world_size=info.world_size,
        drop_last=settings.drop_last,
    )
    where: dict[str, Any] = {"device": group.device, "stack_log": out / f"stacks.rank-{info.rank}.log"}
    data = make_source(job.data, plan, settings, job.collate, job.augment, **where)
    cleanup.callback(data.close)
    if not group.alone and isinstance(data, PlannedSource):  # ready batches are divided by their loader
        screen.say(shares)
    if data.steps_per_epoch() is None and settings.max_steps is None:
        raise UsageError("the data has no length, so the end of an epoch is not known", "Set max_steps.")
    if data.steps_per_epoch() == 0:
        raise UsageError(
            "an epoch has no step: the training data is smaller than one batch",
            f"Lower batch_size (now {settings.batch_size * settings.accumulation} samples a step).",
        )
    eval_data = None
    if job.eval_data is not None:
        if isinstance(job.eval_data, Sized) and len(job.eval_data) == 0:
            raise UsageError("eval_data is empty", "Give it samples, or leave it out.")
        size = settings.eval_batch_size or settings.batch_size
        whole = replace(plan, batch_size=size, accumulation=1, shuffle=False, drop_last=False)
        eval_data = make_source(job.eval_data, whole, settings, job.collate, job.eval_augment, **where)
        cleanup.callback(eval_data.close)
    if settings.monitor is not None and eval_data is None:
        screen.warn(f"monitor: {settings.monitor} is never measured, because there is no eval_data")
    return data, eval_data


@contextlib.contextmanager
def left_as_found(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Undo at the end what a training changes outside of it: random states, torch's switches, modes, gradients."""
    cudnn: Any = torch.backends.cudnn
    states, benchmark = rng_state(device), cudnn.benchmark
    strict, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    precision = allows_tf32 = None
    with contextlib.suppress(RuntimeError):  # the user has set torch's newer fp32_precision switches
        precision = torch.get_float32_matmul_precision()
        allows_tf32 = cudnn.allow_tf32
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError):  # after an error of the GPU
            restore_rng(states, device)
        torch.use_deterministic_algorithms(strict, warn_only=warns)
        cudnn.benchmark = benchmark
        if precision is not None:
            torch.set_float32_matmul_precision(precision)
        if allows_tf32 is not None:
            cudnn.allow_tf32 = allows_tf32
        for module, training in modes:
            module.training = training
        model.zero_grad()


def _stepper(
    job: Job, settings: TrainSettings, group: Group, screen: TrainingScreen, cleanup: contextlib.ExitStack
) -> Stepper:
    """The model on its device, with everything that a step needs but the optimizer: each stage makes its own."""
    device = group.device
    sharded = settings.fsdp and not group.alone
    if settings.fsdp and group.alone:
        screen.say("fsdp: there is only one rank, so the model is not sharded")
    memory_format = torch.channels_last if settings.channels_last else torch.preserve_format
    # FSDP moves a model that does not fit into one GPU there block by block.
    model = job.model.to(device="cpu" if sharded else device, memory_format=memory_format)  # type: ignore[call-overload]
    if settings.gradient_checkpointing:
        recompute(model)
    group.copy_from_first([*model.parameters(), *model.buffers()])
    seed_everything(settings.seed, group.info.rank)
    compiled = torch.compile(model) if settings.compile else model
    if isinstance(job.loss, torch.nn.Module):
        job.loss.to(device)  # class weights have to be where the batches are
    whole = LossModule(model, compiled, job.loss)
    kind = SingleProcess if group.alone else Sharded if sharded else Replicated
    stepper = Stepper(job, settings, kind(whole, group), group, screen.warn)
    replayable = device.type == "cuda" and group.alone and not settings.gradient_checkpointing
    if settings.cuda_graphs and replayable:
        stepper.graphs = cuda_graphs.GraphedModel(model, compiled, screen.warn)
        cleanup.callback(stepper.graphs.undo)
    return stepper


def _check_model(job: Job) -> None:
    """Raise UsageError for a model and a loss that cannot be trained."""
    if not isinstance(job.model, torch.nn.Module):
        raise UsageError(f"the model should be a torch.nn.Module, not {type(job.model).__name__}")
    if not callable(job.loss):
        raise UsageError(f"the loss should be a function of model and batch, not {type(job.loss).__name__}")
    if isinstance(job.loss, torch.nn.Module):
        known = {id(parameter) for parameter in job.model.parameters()}
        own = [name for name, p in job.loss.named_parameters() if p.requires_grad and id(p) not in known]
        if own:
            what = f"the loss has parameters that the optimizer would not see: {', '.join(own[:3])}"
            raise UsageError(what, "Make them part of the model.")


# --------------------------------------------------------------------------- resuming


def resume(state: TrainState, *, resume_from: Path | None = None, fresh: bool = False) -> None:
    """Load the newest checkpoint, or ``resume_from``, and say which. Raises FulltiltErrors."""
    if fresh and state.group.first and (old_root := checkpoint.set_aside(state.root)) is not None:
        state.screen.say(f"The checkpoints of the run before are now in {old_root}")
    state.group.barrier()
    if not fresh:
        # The first rank chooses for all: on a network disk the others may not see the newest one yet.
        found = state.group.gather(newest_complete(state.root) if state.group.first else None)[0]
        for warning in found.warnings:
            state.screen.warn(warning)
        if found.checkpoint is not None:
            # A run started with --resume-from goes on with its own checkpoints once it has some.
            _restore(state, found.checkpoint.folder)
            state.writer.newest = found.checkpoint
            return
    if resume_from is None:
        return
    source = weight_import.place_of(resume_from)
    if (source / checkpoint.MANIFEST_FILE).exists():
        _restore(state, source)
    else:
        for line in weight_import.load_weights(state.model, source).lines():
            state.screen.say(line)
        if (ema := state.stepper.ema) is not None:
            ema.load_state_dict({name: parameter.detach() for name, parameter in state.model.named_parameters()})


def _restore(state: TrainState, folder: Path) -> None:
    if not folder.is_dir():
        raise MachineError(
            f"{folder}, from which the first rank goes on, is not there for rank {state.group.info.rank}",
            "Give an --out on storage that all machines share.",
        )
    loaded = state.load(folder)
    saved = loaded[1]
    # First the optimizer of the last step, then its state: each stage makes its own optimizer.
    train_state.take_over(folder, "progress", state.progress, saved)
    epoch, consumed = state.progress.epoch, state.progress.consumed
    enter_stage(state, min(epoch - 1 if epoch and not consumed else epoch, state.settings.epochs - 1))
    train_state.restore(folder, state.model, state.parts(), loaded)
    changed, then, now = state.kept_settings.changed, state.kept_settings.before, state.kept_settings.now
    if isinstance(state.source, BatchSource) and "batch_size" in changed:
        # Its position counts batches: convert it to the new batch size, rounded down.
        state.progress.consumed = consumed * then["batch_size"] // now["batch_size"]
    where = f"in epoch {epoch + 1}" if consumed or not epoch else f"after epoch {epoch}"
    state.screen.say(f"Resuming from {folder} (step {state.progress.step}, {where})")
    if changed:
        state.screen.say(f"Changed since: {', '.join(f'{name} {then[name]} → {now[name]}' for name in changed)}")
    if consumed and "samples" in changed:
        state.screen.warn(
            f"the rest of epoch {epoch + 1} is drawn from the changed data: a sample may come twice, or not"
        )
