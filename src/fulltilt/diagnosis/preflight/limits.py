"""What the preflight assumes and from where on it speaks up, each figure with its reason."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024**2


@dataclass(frozen=True, slots=True)
class LoaderPlan:
    """The loader that the user means to run. What is None was not said and is assumed."""

    workers: int | None = None
    prefetch: int | None = None
    batch_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class PreflightLimits:
    """Shares are of what is there: 0.8 of the memory, of /dev/shm, of the clock."""

    # -- assumed where the user does not say
    prefetch: int = 2  # DataLoader's own default
    batch_bytes: int = 64 * 3 * 224 * 224 * 4  # a common batch: 64 images of 3 × 224 × 224 float32

    # -- host
    shm_share: float = 0.8  # of what is free: collate holds a batch more than the queues do
    memory_warn_share: float = 0.8  # the rest is where the page cache keeps the data set
    memory_fail_share: float = 0.95  # the kernel's OOM killer is one batch away

    # -- GPU
    vram_free_share: float = 0.9  # a desktop and the driver take up to a tenth of an 8 GB card
    tenant_bytes: int = 64 * MIB  # the smallest CUDA context is about 100 MiB; less is a desktop's window
    temperature_margin_c: float = 5.0  # clocks begin to fall a few degrees before the limit itself
    power_capped_clock: float = 0.85  # a GPU at its power limit does its work unless its clock falls below this

    # -- storage, measured with one reader: workers read side by side, but a slow disk stays slow
    sequential_bytes_per_s: float = 200e6  # a hard disk's best, or 1,500 JPEGs of 130 kB each second
    small_files_per_s: float = 500.0  # four workers then read 2,000 a second, what one GPU takes of 224 px images
    staging_gain: float = 2.0  # under twice as fast from RAM, copying the set there first does not pay
