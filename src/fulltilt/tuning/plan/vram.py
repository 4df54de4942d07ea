"""The GPU's memory by part, and how many samples of a batch fit. Pure functions over runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fulltilt.records import MemoryRecord, RankRecord, Run
from fulltilt.tuning.memory_line import USABLE_VRAM, fit_line

# What CUDA itself takes on each GPU besides torch's memory: 0.4 to 0.6 GiB with cuBLAS and cuDNN loaded.
CONTEXT_BYTES = 600 << 20


@dataclass(frozen=True, slots=True)
class VramBudget:
    """Bytes by part. ``activations_bytes_per_sample`` and ``workspace_bytes`` grow with the batch and do not.

    ``fitted_at`` are the batch sizes they were measured at: with only one of them everything that a step needs is taken
    to grow with the batch, which promises too little for larger batches, never too much.
    """

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    other_bytes: int
    workspace_bytes: int
    activations_bytes_per_sample: float
    fitted_at: tuple[int, ...]

    @property
    def fixed_bytes(self) -> int:
        """What a batch of any size needs."""
        held = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.other_bytes
        return held + self.workspace_bytes

    def needed_bytes(self, batch: int) -> int:
        """torch's memory at a batch size."""
        return self.fixed_bytes + round(self.activations_bytes_per_sample * batch)

    def largest_batch(self, vram_bytes: int) -> int | None:
        """How many samples fit into a GPU, with the usual reserve; None when a batch costs nothing."""
        if self.activations_bytes_per_sample <= 0:
            return None
        room = USABLE_VRAM * vram_bytes - CONTEXT_BYTES - self.fixed_bytes
        return max(0, int(room / self.activations_bytes_per_sample))


def vram_budget(runs: Sequence[Run]) -> VramBudget | None:
    """The budget that the runs show; None when none of them measured a GPU's memory."""
    seen = [found for run in runs if (found := _measured(run)) is not None]
    if not seen:
        return None
    batch, peak, memory = seen[0]
    resident = memory.resident_bytes
    line = fit_line((size, held) for size, held, _ in seen)
    if line is not None and line.each_bytes > 0:
        workspace, per_sample = max(0, round(line.fixed_bytes) - resident), line.each_bytes
    else:
        workspace, per_sample = 0, max(0, peak - resident) / batch
    return VramBudget(
        weights_bytes=memory.weights_bytes,
        gradients_bytes=memory.gradients_bytes,
        optimizer_bytes=memory.optimizer_bytes,
        other_bytes=memory.other_bytes or 0,
        workspace_bytes=workspace,
        activations_bytes_per_sample=per_sample,
        fitted_at=tuple(sorted({size for size, _, _ in seen})),
    )


def _measured(run: Run) -> tuple[int, int, MemoryRecord] | None:
    rank = first_rank(run)
    batch = batch_size(run)
    if rank is None or batch is None or rank.vram_peak_bytes is None or rank.memory is None:
        return None
    return batch, rank.vram_peak_bytes, rank.memory


def first_rank(run: Run) -> RankRecord | None:
    """The rank that stands for all."""
    return run.ranks[0] if run.ranks else None


def batch_size(run: Run) -> int | None:
    """The samples that go through the model at once on one GPU."""
    rank = first_rank(run)
    sizes = [loader.batch_size for loader in rank.loaders if loader.role == "train"] if rank is not None else []
    return next((size for size in sizes if size), None)
