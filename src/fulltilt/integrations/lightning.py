"""Lightning: ``Trainer(callbacks=[FulltiltCallback("runs/a")])`` records the fit and explains it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fulltilt.errors import UsageError
from fulltilt.recorder.manual_recording import Recording

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback
    except ImportError as error:
        remedy = 'Install it: pip install "fulltilt[lightning]"'
        raise UsageError("the Lightning callback needs lightning", remedy) from error


class FulltiltCallback(Callback):  # type: ignore[misc]
    """Records from the start of a fit to its end; marks epochs and validation."""

    def __init__(self, folder: str | Path = "fulltilt-runs/lightning") -> None:
        self.recording = Recording(folder)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """The fit starts."""
        self.recording.start()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """An epoch starts."""
        self.recording.mark_epoch(int(trainer.current_epoch))

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Validation starts, also the sanity check before training."""
        self.recording.mark_validation(True)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Validation has ended."""
        self.recording.mark_validation(False)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The fit failed: what was recorded so far is explained all the same."""
        self.recording.stop(error=exception)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """The fit has ended."""
        self.recording.stop()
