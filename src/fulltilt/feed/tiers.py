"""Chooses the tier that keeps a decoded data set, from the free memory of each."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from fulltilt.errors import DoesNotFit, UsageError
from fulltilt.feed.disk_cache import free_for_caches
from fulltilt.feed.epoch_order import ranks
from fulltilt.figures import size
from fulltilt.probes.host import memory_headroom_bytes

Tier = Literal["vram", "pinned", "ram", "disk", "none"]
Residency = Literal["auto", "vram", "pinned", "ram", "disk", "none"]
GIB = 1024**3


@dataclass(frozen=True)
class TierLimits:
    """How much of the free memory a data set may take, each with its reason."""

    # Fragmentation, and steps with larger activations than those measured.
    vram_margin_share: float = 0.08
    vram_margin_bytes: int = 1 * GIB
    # Before the first step the model's need is not known: optimizer state and activations often take half.
    vram_unknown_model_share: float = 0.5
    # Pinned pages cannot be swapped or reclaimed.
    pinned_share: float = 0.4
    ram_share: float = 0.7


TIER_LIMITS = TierLimits()


# Free bytes on each available tier, without the model's; the fastest tier first.
FreeBytes = dict[Tier, int]


@dataclass(frozen=True)
class Choice:
    """The chosen tier, and why."""

    tier: Tier
    reason: str


def choose_tier(need_bytes: int, free_bytes: FreeBytes, asked: Residency = "auto") -> Choice:
    """The first tier with room for ``need_bytes``, or the one asked for. Raises DoesNotFit, UsageError."""
    if asked not in get_args(Residency):
        raise UsageError(f"residency {asked!r} is unknown", f"Choose one of {', '.join(get_args(Residency))}.")
    if asked == "none":
        return Choice("none", "asked for")
    if asked != "auto":
        if (free := free_bytes.get(asked)) is None:
            raise UsageError(
                f"the data set cannot be kept in {asked}: there is no such memory here", "Use residency='auto'."
            )
        if need_bytes > free:
            raise DoesNotFit(
                f"the decoded data set needs {size(need_bytes)}; {asked} has room for {size(free)}",
                "Use residency='auto', which takes the next tier with room.",
            )
        return Choice(asked, "asked for")
    too_small: list[str] = []
    for tier, free in free_bytes.items():
        if need_bytes <= free:
            skipped = f"; too small: {', '.join(too_small)}" if too_small else ""
            return Choice(tier, f"{size(need_bytes)} of {size(free)}{skipped}")
        too_small.append(f"{tier} {size(free)}")
    return Choice("none", f"{size(need_bytes)} fit nowhere: {', '.join(too_small)}")


def measure_free_bytes(
    device: torch.device,
    cache_dir: Path | None,
    *,
    reserve_bytes: int | None = None,
    model_has_run: bool = False,
) -> FreeBytes:
    """What is free now; without a ``cache_dir`` there is no disk tier.

    ``reserve_bytes`` is the VRAM to leave for the model; None leaves a share (see TierLimits).
    """
    ram = memory_headroom_bytes() // local_ranks()
    free_bytes: FreeBytes = {}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        margin = max(TIER_LIMITS.vram_margin_bytes, int(total * TIER_LIMITS.vram_margin_share))
        if reserve_bytes is None and not model_has_run:
            margin = max(margin, int(total * TIER_LIMITS.vram_unknown_model_share))
        elif reserve_bytes is not None:
            # Memory that the model already took is not free any more.
            margin += max(0, reserve_bytes - torch.cuda.memory_reserved(device))
        free_bytes = {"vram": max(0, free - margin), "pinned": int(ram * TIER_LIMITS.pinned_share)}
    free_bytes["ram"] = int(ram * TIER_LIMITS.ram_share)
    if cache_dir is not None and (disk := free_for_caches(cache_dir)) is not None:
        free_bytes["disk"] = disk
    return free_bytes


def local_ranks() -> int:
    """How many ranks of the job share this machine; where no launcher says it, at most all, and one a GPU."""
    if told := os.environ.get("LOCAL_WORLD_SIZE"):
        return max(1, int(told))
    every, gpus = ranks()[1], torch.cuda.device_count()
    return min(every, gpus) if gpus > 1 else every  # a rank may see no GPU but its own
