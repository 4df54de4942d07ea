"""Putting a run together before its first step: device, ranks, model, data and guards, from a job and its settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fulltilt.errors import MachineError, UsageError
from fulltilt.train import checkpoint, optimizers, precision, rng, shards
from fulltilt.train.activations import recompute
from fulltilt.train.distributed import Group, detect, device_of, divided, same_everywhere
from fulltilt.train.ema import Ema
from fulltilt.train.feeding import source
from fulltilt.train.guard import Guard, Limits
from fulltilt.train.job import Job
from fulltilt.train.keep import KeepPolicy
from fulltilt.train.lock import FolderLock
from fulltilt.train.placement import LossModule, OneProcess, Placement
from fulltilt.train.precision import LossScale, Precision
from fulltilt.train.progress import Screen
from fulltilt.train.replicated import Replicated
from fulltilt.train.sampler import EpochPlan
from fulltilt.train.schedule import Stage, stage_at, trainable
from fulltilt.train.settings import TrainSettings
from fulltilt.train.sources import LoaderSettings, Source
from fulltilt.train.state import KeptSettings, MetricHistory, Part, Progress, RandomStates, expected_bytes
from fulltilt.train.step import MicroBatch, Stepper
from fulltilt.train.totals import Totals
from fulltilt.train.writer import Writer, check_space

# What a time limit reckons with before the first save: a network disk on a bad day.
SLOW_DISK_BYTES_PER_S = 100e6


@dataclass(slots=True)
class Rig:
    """Everything a run works with. ``source`` and the stepper's optimizer change with the stage."""

    job: Job
    settings: TrainSettings
    out: Path
    device: torch.device
    group: Group
    model: torch.nn.Module
    compiled: Callable[..., Any]
    precision: Precision
    stages: tuple[Stage, ...]
    source: Source
    eval_source: Source | None
    stepper: Stepper
    scale: LossScale
    micro: MicroBatch
    eval_micro: MicroBatch
    ema: Ema | None
    totals: Totals
    guard: Guard
    history: MetricHistory
    progress: Progress
    kept_settings: KeptSettings
    writer: Writer
    screen: Screen
    lock: FolderLock | None = None
    stage_index: int = -1

    @property
    def root(self) -> Path:
        """Where the checkpoints are."""
        return self.writer.root

    @property
    def epochs(self) -> int:
        """Epochs of all stages together."""
        return sum(stage.epochs for stage in self.stages)

    def gpu_names(self) -> list[str]:
        """The names of all ranks' GPUs, the first rank's first; none on the CPU."""
        if self.device.type != "cuda":
            return []
        return [str(name) for name in self.group.gather(torch.cuda.get_device_name(self.device))]

    def parts(self) -> dict[str, Part]:
        """What a checkpoint holds besides the model."""
        parts: dict[str, Part] = {
            "progress": self.progress,
            "optimizer": shards.OptimizerState(self.stepper.optimizer),
            "loss_scale": self.scale,
            "random": RandomStates(self.group),
            "totals": self.totals,
            "guard": self.guard,
            "micro_batch": self.micro,
            "eval_micro_batch": self.eval_micro,
            "history": self.history,
            "settings": self.kept_settings,
        }
        if self.ema is not None:
            parts["ema"] = self.ema
        return parts

    def close(self, *, failed: bool = False) -> None:
        """End the loader's workers and leave the group of ranks; ``failed``: the others may not know yet."""
        for data in (self.source, self.eval_source):
            if data is not None:
                data.close()
        self.group.close(failed=failed)
        if self.lock is not None:
            self.lock.release()

    def share_buffers(self) -> None:
        """Give every rank the first rank's buffers: running statistics differ, and only one set counts."""
        self.group.copy_from_first(list(self.model.buffers()))

    def check_drift(self) -> None:
        """Raise MachineError when the ranks no longer hold the same weights."""
        if not self.stepper.placement.lockstep and not same_everywhere(list(self.model.parameters()), self.group):
            raise MachineError(
                f"the ranks' weights differ at step {self.progress.step}: one GPU computed wrongly",
                "Resume from the last checkpoint, and have that machine's memory checked.",
            )


def rig_up(job: Job, settings: TrainSettings, out: Path, screen: Screen | None = None) -> Rig:
    """Build the run. Everything that can be wrong before step 0 is found here. Raises FulltiltErrors."""
    ranks = detect()
    device = device_of(settings.device, ranks.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = Group(ranks, device, settings.hang_timeout_s)
    policy = KeepPolicy(settings.keep_last, settings.keep_best if settings.monitor else 0, settings.monitor_mode)
    root = out / "checkpoints"
    lock = None
    if group.first:
        checkpoint.prepare(root)
        lock = FolderLock(out)
        checkpoint.sweep(root)  # only now: what looks left over could have been another run's, in the making
    group.barrier()
    rng.seed_everything(settings.seed)  # alike on every rank: models that draw their weights late must agree
    precision.set_tf32(settings.tf32)
    if settings.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False

    memory_format = torch.channels_last if settings.channels_last else torch.preserve_format
    sharded = settings.sharding == "full" and not group.alone
    # A model that does not fit into one GPU goes there part by part.
    model = job.model.to(device="cpu" if sharded else device, memory_format=memory_format)  # type: ignore[call-overload]
    if settings.gradient_checkpointing:
        recompute(model)
    group.copy_from_first([*model.parameters(), *model.buffers()])
    rng.seed_everything(settings.seed, ranks.rank)

    arithmetic = precision.choose(settings.precision, device)
    scale = LossScale(device, active=arithmetic.scaled)
    micro = MicroBatch(splittable=job.splittable)
    stages = job.stages or (Stage("training", settings.epochs),)
    shown = screen or Screen(out, speaks=group.first)
    compiled = torch.compile(model) if settings.compile else model
    whole = LossModule(model, compiled, job.loss)
    placement: Placement = OneProcess(whole)
    if not group.alone:
        if sharded:
            from fulltilt.train.sharded import Sharded  # FSDP takes its time to import

            placement = Sharded(whole, group)
        else:
            placement = Replicated(whole, group)
    stepper = Stepper(model, placement, arithmetic, scale, micro, group, shown.warn, joint=job.joint)
    stepper.clip_norm = settings.clip_norm
    stepper.memory_format = torch.channels_last if settings.channels_last else None
    ema = stepper.ema = Ema(model, settings.ema_decay) if settings.ema_decay is not None else None

    shares = divided(settings.batch_size, settings.workers, ranks)
    if not group.alone:
        if device.type == "cpu":
            shown.say(f"Using {ranks.world} processes on the CPU for training")
        shown.say(shares)
    loading = LoaderSettings(
        settings.workers,
        settings.prefetch,
        pin_memory=device.type == "cuda",
        stack_log=out / f"stacks.rank-{ranks.rank}.log",
        device=device,
        residency=settings.residency,
        on_bad_sample=settings.on_bad_sample,
        max_bad_share=settings.max_bad_share,
    )
    plan = EpochPlan(
        samples=0,
        batch_size=settings.batch_size,
        accumulation=settings.accumulation,
        seed=settings.seed,
        rank=ranks.rank,
        world=ranks.world,
        drop_last=settings.drop_last,
    )
    data = source(job.data, plan, loading, job.collate, job.augment)
    if data.steps_per_epoch() is None and settings.max_steps is None:
        raise UsageError("the data has no length, so nobody knows when it ends", "Set max_steps.")
    if data.steps_per_epoch() == 0:
        raise UsageError("an epoch has no step: the data set is smaller than one batch", "Lower batch_size.")

    rig = Rig(
        job=job,
        settings=settings,
        out=out,
        device=device,
        group=group,
        model=model,
        compiled=compiled,
        precision=arithmetic,
        stages=stages,
        source=data,
        eval_source=_eval_source(job, settings, plan, loading),
        stepper=stepper,
        scale=scale,
        micro=micro,
        eval_micro=MicroBatch(splittable=job.splittable),
        ema=ema,
        totals=Totals(device),
        guard=Guard(_limits(settings)),
        history=MetricHistory(settings.monitor_mode),
        progress=Progress(),
        kept_settings=KeptSettings(settings),
        writer=Writer(root, policy),
        screen=shown,
        lock=lock,
    )
    enter_stage(rig, 0)
    size = expected_bytes(model, stepper.optimizer, averaged=ema is not None)
    if group.first:
        check_space(root, size, policy)
    rig.writer.longest_save_s = size / SLOW_DISK_BYTES_PER_S  # until one has been measured
    return rig


def enter_stage(rig: Rig, epoch: int) -> None:
    """Set up the stage that ``epoch`` lies in: optimizer, batch, and which parameters move in this epoch."""
    index, epoch_in_stage = stage_at(rig.stages, epoch)
    stage = rig.stages[index]
    names = trainable((name for name, _ in rig.model.named_parameters()), stage, epoch_in_stage)
    before = [p.requires_grad for p in rig.model.parameters()]
    for name, parameter in rig.model.named_parameters():
        parameter.requires_grad_(name in names)
    moved = before != [p.requires_grad for p in rig.model.parameters()]
    if index != rig.stage_index:
        settings = rig.settings
        accumulation = stage.accumulation or settings.accumulation
        rig.source = rig.source.resized(stage.batch_size or settings.batch_size, accumulation)
        if rig.stage_index < 0 or stage.fresh_optimizer:
            make = rig.job.optimizer or optimizers.build
            rig.stepper.optimizer = make(rig.model, settings, rig.device)
        if rig.job.on_stage is not None:
            rig.job.on_stage(stage, rig.model)
    if index != rig.stage_index or moved:
        rig.stepper.use(rig.stepper.optimizer)
    rig.stage_index = index


def _limits(settings: TrainSettings) -> Limits:
    return Limits(
        settings.bad_steps_in_a_row,
        settings.rollbacks,
        settings.spike_factor,
        settings.on_spike,
        settings.loss_scale_floor,
    )


def _eval_source(job: Job, settings: TrainSettings, plan: EpochPlan, loading: LoaderSettings) -> Source | None:
    if job.eval_data is None:
        return None
    size = settings.eval_batch_size or settings.batch_size
    quiet = EpochPlan(samples=0, batch_size=size, seed=plan.seed, rank=plan.rank, world=plan.world, shuffle=False)
    return source(job.eval_data, quiet, loading, job.collate, job.eval_augment)
