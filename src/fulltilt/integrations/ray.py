"""Ray Train: ``TorchTrainer(recorded(train_loop, "/shared/runs/a"), ...)`` records every worker and explains the job.

Each worker writes its own folder below the given one, which all nodes must share; `fulltilt report` reads them as one
run. A run that Ray restarts is the next attempt of the same job. Batches of Ray Data are recorded like any loader's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fulltilt.errors import UsageError
from fulltilt.recorder.manual_recording import Recording
from fulltilt.records import Task

try:
    import ray.train
except ImportError as error:
    raise UsageError("fulltilt.integrations.ray needs Ray Train", 'Install it: pip install "ray[train]"') from error


def recorded(train_loop: Callable[..., Any], folder: str | Path) -> Callable[..., Any]:
    """``train_loop`` for TorchTrainer, recorded on each worker from its first line to its last."""

    @functools.wraps(train_loop)  # Ray asks how many arguments it takes
    def loop(*config: Any) -> Any:
        context = ray.train.get_context()
        job = Task(context.get_experiment_name(), context.get_world_rank(), context.get_world_size())
        with Recording(folder, name=train_loop.__name__, task=job):
            return train_loop(*config)

    return loop
