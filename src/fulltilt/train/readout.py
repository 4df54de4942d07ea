"""Figures that leave the GPU without stopping it: copied behind the step and read a fixed number of steps later.

The lag is fixed, not "whenever it is ready", so that decisions taken on these figures fall on the same step in every
run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

import torch

Label = TypeVar("Label")


class Readout(Generic[Label]):
    """A queue of small device vectors, each with a label from the host."""

    def __init__(self, device: torch.device, lag: int | None = None) -> None:
        self.lag = (8 if device.type == "cuda" else 0) if lag is None else lag
        self._queue: deque[tuple[Label, torch.Tensor, torch.cuda.Event | None]] = deque()
        self._spare: list[tuple[torch.Tensor, torch.cuda.Event]] = []

    def push(self, label: Label, figures: torch.Tensor) -> None:
        """Queue the figures of one step."""
        if not figures.is_cuda:
            self._queue.append((label, figures, None))
            return
        if not self._spare:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
            self._spare.append((torch.empty_like(figures, device="cpu", pin_memory=True), event))
        host, event = self._spare.pop()
        host.copy_(figures, non_blocking=True)
        event.record()
        self._queue.append((label, host, event))

    def due(self) -> Iterator[tuple[Label, list[float]]]:
        """What was queued more than ``lag`` steps ago. The GPU has long passed there, so this hardly ever waits."""
        while len(self._queue) > self.lag:
            yield self._take()

    def drain(self) -> Iterator[tuple[Label, list[float]]]:
        """Everything queued. Waits for the GPU."""
        while self._queue:
            yield self._take()

    def clear(self) -> None:
        """Forget what is queued, after the run went back to an earlier state."""
        for _ in self.drain():
            pass

    def _take(self) -> tuple[Label, list[float]]:
        label, host, event = self._queue.popleft()
        if event is not None:
            event.synchronize()
        figures: list[float] = host.tolist()
        if event is not None:
            self._spare.append((host, event))
        return label, figures
