"""One optimizer step: precision, forward, backward, all-reduce, clip, update. Nothing here waits for the device.

When memory runs out, the micro-batch is halved and all ranks repeat the step with the same effective batch.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import torch

from fulltilt.errors import DoesNotFit, UsageError
from fulltilt.recorder.manual_recording import LoopMarks
from fulltilt.train import optimizers
from fulltilt.train.config import TrainSettings
from fulltilt.train.cuda_graphs import GraphedModel
from fulltilt.train.data_source import split_batch, to_device
from fulltilt.train.distributed import Group, Piece, SingleProcess, local_shard
from fulltilt.train.guards import MicroBatch, RankDoesNotFit, is_out_of_memory
from fulltilt.train.job import Job, value_and_means, with_gradient
from fulltilt.train.metrics import EpochTotals
from fulltilt.train.optimizers import Ema

Say = Callable[[str], None]


_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose_precision(name: str, device: torch.device) -> str:
    """Resolve ``auto``: bf16 where the GPU has it, fp16 on older GPUs, fp32 on the CPU."""
    if name != "auto":
        return name
    if device.type != "cuda":
        return "fp32"
    return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"


def set_tf32(allowed: bool) -> None:
    """Allow or forbid TF32 for what stays in fp32. Does nothing on GPUs without it."""
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    with contextlib.suppress(RuntimeError):  # the user has set torch's newer fp32_precision switches
        torch.backends.cudnn.allow_tf32 = allowed


class LossScale:
    """The factor on the loss under fp16: halved when gradients overflow, doubled after many good steps.

    torch's GradScaler waits for the device with most optimizers; this one does not.
    """

    INITIAL = 2.0**16
    GROWTH_INTERVAL = 2000

    def __init__(self, device: torch.device, *, active: bool) -> None:
        self.active = active
        self.scale = torch.full((), self.INITIAL if active else 1.0, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, bad: torch.Tensor) -> None:
        """Move the scale after a step; ``bad`` is 0.0 or 1.0 on the device."""
        if self.active:
            torch._amp_update_scale_(self.scale, self.good_steps, bad, 2.0, 0.5, self.GROWTH_INTERVAL)

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"scale": self.scale, "good_steps": self.good_steps, "active": self.active}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From the checkpoint, unless the precision was changed."""
        if self.active and state.get("active", True):
            self.scale.copy_(state["scale"])
            self.good_steps.copy_(state["good_steps"])


# --------------------------------------------------------------------------- the step


class Stepper:
    """Runs optimizer steps and returns their figures, still on the device."""

    def __init__(self, job: Job, settings: TrainSettings, placement: SingleProcess, group: Group, say: Say) -> None:
        self.model, self.placement, self.group, self.say = job.model, placement, group, say
        self.joint, self.clip_norm = job.joint, settings.clip_norm
        self.precision = choose_precision(settings.precision, group.device)
        self.scale = LossScale(group.device, active=self.precision == "fp16")
        self.micro = MicroBatch(splittable=job.splittable)
        self.ema = Ema(job.model, settings.ema_decay) if settings.ema_decay is not None else None
        self.memory_format = torch.channels_last if settings.channels_last else None
        self.graphs: GraphedModel | None = None
        self.optimizer: torch.optim.Optimizer
        self.marks = LoopMarks()
        self._parameters: list[torch.nn.Parameter] = []
        # Exchanged between the ranks in each step, with out-of-memory and left-out parameters.
        self.stop_flag = 0.0
        self.stop_agreed = 0.0

    def use_trainable(self) -> None:
        """Train what requires a gradient from now on: at a new stage, and when the trainable parameters change."""
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.placement.use(self._parameters)

    def step(self, taken: list[Piece], samples: int, number: int, totals: EpochTotals) -> torch.Tensor:
        """Train on ``taken``, this rank's part of ``samples`` samples. Returns loss, gradient norm, bad, loss scale."""
        while True:
            loss, means, failed_at = self._attempt(taken, samples)
            agreed = self.group.agree([failed_at, self.stop_flag, self.placement.left_out])
            failed_at, self.stop_agreed, left_out = int(agreed[0]), agreed[1], agreed[2]
            if not failed_at:
                break
            if self.make_room(self.micro, failed_at, f"step {number}"):
                self.say(
                    f"step {number}: memory ran out; going on with micro-batches of {self.micro.most}"
                    f" (the effective batch stays {samples})"
                )
        if left_out:
            self.placement.forget_left_out()
        figures = self._update(loss)
        for values, count in means:
            totals.add(values, count)
        return figures

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context that the forward pass and the loss run in."""
        half = _HALF.get(self.precision)
        return contextlib.nullcontext() if half is None else torch.autocast(self.group.device.type, dtype=half)

    def make_room(self, micro: MicroBatch, failed_at: int, where: str) -> bool:
        """After memory ran out: give up the CUDA graphs, or without any halve ``micro``. Returns whether it was halved.

        Called when the failed attempt has returned, so that its frames hold no tensors any more.
        """
        gc.collect()
        torch.cuda.empty_cache()
        if self.graphs is not None and self.graphs.give_up():
            self.say(f"{where}: memory ran out; going on without CUDA graphs")
            return False
        micro.halve(failed_at, f"in {where}")
        return True

    def _attempt(self, taken: list[Piece], samples: int) -> tuple[torch.Tensor, list[tuple[dict[str, Any], int]], int]:
        """Forward and backward over all micro-batches; the last value is 0 or the size that ran out of memory."""
        device = self.group.device
        # Each operation on a scalar costs the host as much as one on a whole batch: keep them few.
        loss: torch.Tensor | None = None
        means: list[tuple[dict[str, Any], int]] = []
        largest = running = 0
        failed_at = 0
        try:
            self.placement.zero_gradients()
            pieces = [piece for batch, total in taken for piece in split_batch(batch, total, self.micro.most)]
            largest = max((count for _, count in pieces), default=0)
            if self.joint:
                pieces = [([piece for piece, _ in pieces], sum(count for _, count in pieces))]
            pieces = self.placement.pieces(pieces)
            for place, (piece, running) in enumerate(pieces):
                with self.marks.transfer():
                    on_device = to_device(piece, device, self.memory_format)
                with self.autocast():
                    outcome = self.placement.loss_of(on_device, last=place == len(pieces) - 1)
                value, metrics, _ = value_and_means(outcome, device)
                share, weight = with_gradient(value).float(), running * self.placement.divisor / samples
                if weight != 1.0:
                    share = share * weight
                (share * self.scale.scale if self.scale.active else share).backward()  # type: ignore[no-untyped-call, unused-ignore]
                loss = share.detach() if loss is None else loss + share.detach()
                if metrics:
                    means.append(({name: mean.detach() for name, mean in metrics.items()}, running))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failed_at = max(min(running, largest), 1)
            if self.placement.lockstep:
                raise RankDoesNotFit(
                    f"memory ran out with {failed_at} samples at once, where FSDP cannot repeat the step",
                    "Lower batch_size and raise accumulation by as much: the same is trained, and the run resumes.",
                ) from error
        except ValueError as error:
            if "Expected more than 1 value per channel" not in str(error):
                raise
            raise UsageError(
                "BatchNorm cannot train on one value per channel: a batch, perhaps the last, has a single sample",
                "Set drop_last: true in the config, or change batch_size; larger images have more values, too.",
            ) from error
        if loss is None:
            loss = torch.zeros((), device=device)
        elif not self.group.alone:
            loss = loss.clone()  # averaged in place, and it may be the tensor that the job's loss returned
        with self.marks.communication():
            self.placement.finish(loss)
        return loss, means, failed_at

    @torch.no_grad()
    def _update(self, loss: torch.Tensor) -> torch.Tensor:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = self.placement.norm(gradients) if gradients else torch.zeros_like(loss)
        factor = None  # unscaling and clipping in one multiplication
        if self.scale.active:
            factor = 1.0 / self.scale.scale
            norm = norm * factor
        if self.clip_norm is not None:
            clip = torch.clamp(self.clip_norm / (norm + 1e-6), max=1.0)
            factor = clip if factor is None else clip * factor
        # 1 where either is infinite or NaN, else 0; torch.isfinite of each would be ten kernels.
        bad = ((norm + loss) * 0).ne(0).float()
        if factor is not None and gradients:
            torch._foreach_mul_([local_shard(gradient) for gradient in gradients], factor)
        figures = torch.stack([loss, norm.float(), bad, self.scale.scale])
        try:
            optimizers.step_unless(self.optimizer, bad)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise DoesNotFit(
                "memory ran out in the optimizer, where smaller batches do not help",
                "Use optimizer: adamw8bit or sgd, or a smaller model.",
            ) from error
        self.scale.update(bad)
        if self.ema is not None:
            self.ema.update(self.model)
        return figures
