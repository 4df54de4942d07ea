"""The order of an epoch, ready when the epoch begins."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from fulltilt import captures


class UpcomingOrder:
    """Draws the order of the next epoch while this one trains, which takes seconds for millions of samples.

    The thread that draws leaves the device alone: where the host sets the pace, its calls would hold up the launches.
    """

    def __init__(self, draw: Callable[[int], torch.Tensor], device: torch.device) -> None:
        self._draw, self._device = draw, device
        self._next: tuple[int | None, Future[torch.Tensor]] = (None, Future())
        begin = captures.leave_alone if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "fulltilt-order", begin)

    def of(self, epoch: int) -> torch.Tensor:
        """The order of ``epoch`` on the device; the one after it is begun."""
        begun, upcoming = self._next
        indices = upcoming.result() if begun == epoch else self._drawn(epoch)
        self._next = (epoch + 1, self._thread.submit(self._drawn, epoch + 1))
        return indices.to(self._device, non_blocking=True)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def _drawn(self, epoch: int) -> torch.Tensor:
        indices = self._draw(epoch)
        if self._device.type != "cuda":
            return indices
        with torch.cuda.device(self._device):  # a thread begins with the first device, whichever the process uses
            return indices.pin_memory()  # a copy from other memory would wait until all that was launched is done
