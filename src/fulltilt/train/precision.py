"""Mixed precision: which arithmetic a step uses, and the loss scale that fp16 needs. Nothing here waits for the GPU."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Precision:
    """The arithmetic of the forward pass. ``autocast`` is None for full precision; fp16 needs its loss scaled."""

    name: str
    device: torch.device
    autocast: torch.dtype | None

    @property
    def scaled(self) -> bool:
        """Gradients of fp16 underflow unless the loss is scaled up."""
        return self.autocast is torch.float16

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """The context that the forward pass and the loss run in."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)


def choose(name: str, device: torch.device) -> Precision:
    """Resolve ``auto``: bf16 where the GPU has it, fp16 on older GPUs, fp32 on the CPU."""
    if name == "auto":
        if device.type != "cuda":
            name = "fp32"
        else:
            name = "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"
    return Precision(name, device, {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name))


def set_tf32(allowed: bool) -> None:
    """Allow or forbid TF32 for what stays in fp32. Does nothing on GPUs without it."""
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    with contextlib.suppress(RuntimeError):  # the user has set torch's newer fp32_precision switches; theirs stand
        torch.backends.cudnn.allow_tf32 = allowed


class LossScale:
    """The factor on the loss under fp16: halved when gradients overflow, doubled after many good steps.

    torch's GradScaler reads its verdict back to the host for most optimizers; this one stays on the device.
    """

    GROWTH_INTERVAL = 2000
    MOST = 2.0**120  # infinity would stay infinite however often it is halved

    def __init__(self, device: torch.device, *, active: bool, initial: float = 2.0**16) -> None:
        self.active = active
        self.scale = torch.full((), initial if active else 1.0, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, bad: torch.Tensor) -> None:
        """Move the scale after a step; ``bad`` is 0.0 or 1.0 on the device."""
        if not self.active:
            return
        bad = bad.bool()
        grown = self.good_steps + 1 >= self.GROWTH_INTERVAL
        self.scale.mul_(torch.where(bad, 0.5, torch.where(grown, 2.0, 1.0))).clamp_(max=self.MOST)
        self.good_steps.copy_(torch.where(bad | grown, 0, self.good_steps + 1))

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"scale": self.scale, "good_steps": self.good_steps, "active": self.active}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From the checkpoint. A run that now trains in another precision keeps its own scale."""
        if self.active and state.get("active", True):
            self.scale.copy_(state["scale"])
            self.good_steps.copy_(state["good_steps"])
