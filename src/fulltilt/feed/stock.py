"""Data sets that cannot be kept as fixed-shape tensors: torch's own DataLoader with tuned settings, then the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from fulltilt.feed.order import BatchOrder


class _EpochBatches:
    """A batch sampler that gives what it is told to; persistent workers need one object for all epochs."""

    def __init__(self, order: BatchOrder) -> None:
        self.order = order
        self.drawn: list[torch.Tensor] = []

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.drawn:
            yield batch.tolist()

    def __len__(self) -> int:
        return self.order.batches_per_epoch()


class StockLoader:
    """Batches of ``dataset`` through ``collate_fn``, moved to the device without waiting."""

    def __init__(
        self, dataset: Any, order: BatchOrder, collate_fn: Callable[..., Any] | None, workers: int, device: torch.device
    ) -> None:
        self.device = device
        self._batches = _EpochBatches(order)
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=self._batches,
            num_workers=workers,
            collate_fn=collate_fn,
            pin_memory=device.type == "cuda",
            persistent_workers=workers > 0,
        )

    def batches(self, epoch: int, start: int) -> Iterator[tuple[Any, torch.Tensor]]:
        """The batches of ``epoch`` from number ``start`` on, each with its sample indices."""
        # Drawn once: a random sampler would give others when asked again.
        self._batches.drawn = drawn = self._batches.order.batches(epoch)[start:]
        for batch, mine in zip(self._loader, drawn, strict=True):
            yield to_device(batch, self.device), mine.to(self.device, non_blocking=True)


def to_device(value: Any, device: torch.device) -> Any:
    """A batch of any structure on ``device``, without waiting."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(to_device(item, device) for item in value)
    return value
