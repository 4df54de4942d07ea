"""The training engine: loop, precision, DDP and FSDP, checkpoints, guards, schedule, progress.

from fulltilt.train import Job, TrainSettings, train
train(Job(model=net, loss=loss, data=dataset), TrainSettings(epochs=20), Path("out"))
"""

from __future__ import annotations

import importlib
from typing import Any

# Imported on first use: the settings do not need torch.
_HOMES = {
    "Job": "job",
    "Outcome": "train_state",
    "Stage": "job",
    "StepEnd": "train_state",
    "TrainSettings": "config",
    "exit_code_of": "exit_code",
    "train": "loop",
}
__all__ = sorted(_HOMES)  # noqa: PLE0605 - one list of the names is enough


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
