"""The engine's settings: one frozen record, every field with its unit, its default and its bounds."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Literal

from fulltilt.records import MOST_OF_A_SETTING


def bounded(default: Any, *, least: float | None = None, above: float | None = None, most: float | None = None) -> Any:
    """A field with bounds that ``config.parse`` checks."""
    return field(default=default, metadata={"least": least, "above": above, "most": most})


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """How to train. Batch size and workers are totals over all ranks; times are seconds."""

    # how long
    epochs: int = bounded(1, least=1)
    max_steps: int | None = bounded(None, least=1)
    max_time_s: float | None = bounded(None, above=0)
    # what a step is
    batch_size: int = bounded(32, least=1)
    eval_batch_size: int | None = bounded(None, least=1)
    accumulation: int = bounded(1, least=1)
    drop_last: bool = False
    seed: int = bounded(0, least=0, most=2**32 - 1)
    # how the weights move
    optimizer: Literal["adamw", "adamw8bit", "adam", "sgd"] = "adamw"
    lr: float = bounded(1e-3, above=0)
    min_lr: float = bounded(0.0, least=0)
    weight_decay: float = bounded(0.01, least=0)
    momentum: float = bounded(0.9, least=0, most=1)
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_epochs: float = bounded(0.0, least=0)
    warmup_steps: int | None = bounded(None, least=0)
    clip_norm: float | None = bounded(None, above=0)
    ema_decay: float | None = bounded(None, above=0, most=1)
    # how it is computed
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    tf32: bool = True
    channels_last: bool = False
    compile: bool = False
    cuda_graphs: bool = False
    gradient_checkpointing: bool = False
    deterministic: bool = False
    sharding: Literal["none", "full"] = "none"
    # how the data comes
    workers: int = bounded(0, least=0)
    prefetch: int = bounded(2, least=1, most=MOST_OF_A_SETTING)
    residency: Literal["auto", "vram", "pinned", "ram", "disk", "none"] = "auto"
    on_bad_sample: Literal["stop", "skip"] = "stop"
    max_bad_share: float = bounded(0.01, least=0, most=1)
    # what is saved
    save_every: int | None = bounded(None, least=1)
    keep_last: int = bounded(2, least=1)
    keep_best: int = bounded(1, least=0)
    monitor: str | None = None
    monitor_mode: Literal["max", "min"] = "max"
    target: float | None = None
    # what is guarded
    bad_steps_in_a_row: int = bounded(5, least=1)
    rollbacks: int = bounded(1, least=0)
    spike_factor: float | None = bounded(10.0, above=1)
    on_spike: Literal["report", "rollback"] = "report"
    loss_scale_floor: float = bounded(2.0**-10, above=0)
    hang_timeout_s: float = bounded(1800.0, above=0)
    drift_every: int | None = bounded(1000, least=1)
    # what is shown
    eval_every: int = bounded(1, least=1)
    log_every: int | None = bounded(None, least=1)
    record: bool = True
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] | None = None
    profile_steps: int | None = bounded(None, least=1)

    def problems(self) -> list[str]:
        """What is wrong between fields that are each right alone."""
        found = []
        world = os.environ.get("WORLD_SIZE", "")
        most_workers = MOST_OF_A_SETTING * (int(world) if world.isdecimal() else 1)
        if self.workers > most_workers:
            found.append(f"workers: should be at most {most_workers:,}, not {self.workers:,}")
        if self.min_lr > self.lr:
            found.append(f"min_lr ({self.min_lr:g}) is above lr ({self.lr:g})")
        if self.max_steps is None and self.warmup_epochs > self.epochs:
            found.append(f"warmup_epochs ({self.warmup_epochs:g}) is longer than the run ({self.epochs} epochs)")
        if self.warmup_steps is not None and self.warmup_epochs:
            found.append("give warmup_steps or warmup_epochs, not both")
        for name, refused in (("compile", True), ("channels_last", True), ("optimizer", "adamw8bit")):
            if self.sharding == "full" and getattr(self, name) == refused:
                found.append(f"sharding: full and {name}: {str(refused).lower()} do not go together")
        if self.on_spike == "rollback" and self.spike_factor is None:
            found.append("on_spike: rollback needs a spike_factor")
        if self.target is not None and self.monitor is None:
            found.append("target needs monitor: the name of the metric that is to reach it")
        if self.keep_best and self.monitor is None and self.monitor_mode == "min":
            found.append("monitor_mode: min needs monitor: the name of a metric")
        return found
