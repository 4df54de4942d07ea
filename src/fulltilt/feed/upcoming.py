"""The order of an epoch, ready when the epoch begins."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from fulltilt import captures


class UpcomingOrder:
    """Draws the order of the next epoch, and brings it to ``device``, while this one trains.

    For millions of samples drawing takes seconds; and a copy among the training's own work would wait until all of that
    is done, so that in short epochs the GPU stood still at every turn.
    """

    def __init__(self, draw: Callable[[int], torch.Tensor], device: torch.device) -> None:
        self._draw, self._device = draw, device
        self._next: tuple[int | None, Future[torch.Tensor]] = (None, Future())
        begin = captures.leave_alone if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "fulltilt-order", begin)
        self._stream: Any = None

    def of(self, epoch: int) -> torch.Tensor:
        """The order of ``epoch``; the one after it is begun."""
        begun, upcoming = self._next
        indices = upcoming.result() if begun == epoch else self._drawn(epoch)
        self._next = (epoch + 1, self._thread.submit(self._drawn, epoch + 1))
        if indices.is_cuda:
            # It was allocated for another stream, which must not have the memory back too early.
            indices.record_stream(torch.cuda.current_stream(indices.device))
        return indices

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def _drawn(self, epoch: int) -> torch.Tensor:
        indices = self._draw(epoch)
        if self._device.type != "cuda":
            return indices
        if self._stream is None:  # one for all epochs: memory that was allocated on a stream is reused on it alone
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call, unused-ignore]
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            # From memory that is not pinned the driver copies piece by piece, and the training cannot launch meanwhile.
            there = indices.pin_memory().to(self._device, non_blocking=True)
            self._stream.synchronize()
        return there
