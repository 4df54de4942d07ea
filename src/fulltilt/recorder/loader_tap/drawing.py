"""What is being drawn in this process: from which loader, for training or for evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fulltilt.recorder.loader_tap.tap import LoaderTap


class Drawing:
    """What the taps of a process know together."""

    def __init__(self, recorder: Any, gradients: Callable[[], bool]) -> None:
        self.recorder = recorder
        self.gradients = gradients
        self.was_evaluating = False
        # Whether a thread of the user's own draws batches for the training thread.
        self.drawn_elsewhere = False
        self.waiting_for: LoaderTap | None = None
        self.feeding: LoaderTap | None = None

    def evaluating(self, tap: LoaderTap) -> bool:
        """Whether what is drawn now is for evaluation: gradients are off, or the trained model is in eval mode.

        Hugging Face's Trainer draws the next batches before it switches the model back: a loader that has trained
        goes on training.
        """
        return not self.gradients() or (self.recorder.eval_mode and not tap.trains)

    def trained(self) -> None:
        """backward() is called: the loader drawn last is one that trains."""
        if self.feeding is not None:
            self.feeding.trains = True
