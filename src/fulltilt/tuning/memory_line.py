"""Memory as a straight line: VRAM over the batch size, RAM over the workers. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fulltilt.records import Trial

# Of the GPU's memory: the rest is fragmentation and what the driver itself needs.
USABLE_VRAM = 0.92


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """``fixed_bytes`` without any, and ``each_bytes`` more for each sample of a batch or each worker."""

    fixed_bytes: float
    each_bytes: float

    def at(self, count: float) -> float:
        """Bytes needed for so many."""
        return self.fixed_bytes + self.each_bytes * count

    def most_within(self, limit_bytes: float) -> int | None:
        """How many fit; None when more of them need no more memory."""
        if self.each_bytes <= 0:
            return None
        return max(0, int((limit_bytes - self.fixed_bytes) / self.each_bytes))


def fit_line(points: Iterable[tuple[int, int]]) -> MemoryLine | None:
    """The least-squares line through (count, bytes); None without two different counts."""
    known = list(points)
    counts = {count for count, _ in known}
    if len(counts) < 2:
        return None
    mean_count = sum(count for count, _ in known) / len(known)
    mean_bytes = sum(held for _, held in known) / len(known)
    spread = sum((count - mean_count) ** 2 for count, _ in known)
    slope = sum((count - mean_count) * (held - mean_bytes) for count, held in known) / spread
    return MemoryLine(mean_bytes - slope * mean_count, slope)


def vram_line(trials: Iterable[Trial]) -> MemoryLine | None:
    """VRAM over the batch size."""
    return fit_line(
        (trial.in_force.batch_size, trial.vram_peak_bytes)
        for trial in trials
        if trial.state == "ok" and trial.in_force.batch_size is not None and trial.vram_peak_bytes is not None
    )


def ram_line(trials: Iterable[Trial]) -> MemoryLine | None:
    """RAM of the whole job over the loader's workers."""
    return fit_line(
        (trial.in_force.num_workers, trial.ram_peak_bytes)
        for trial in trials
        if trial.state == "ok" and trial.in_force.num_workers is not None and trial.ram_peak_bytes is not None
    )
