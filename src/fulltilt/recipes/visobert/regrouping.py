"""A checkpoint of another batch size, as the Trainer would have written it with this one.

The Trainer finds the epoch by dividing its steps by those of an epoch. After a change of the batch size these are not
the steps that were made: a run that is half done would be nearly finished, or hardly begun.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fulltilt.recipes.visobert.folder import STATE_FILE

# What decides how many steps an epoch has.
DECISIVE = frozenset({"batch_size", "accumulation", "samples"})


def position_in(folder: Path, per_epoch: int) -> int:
    """How many steps of ``per_epoch`` an epoch lead to where ``folder`` stands; within an epoch rounded down."""
    state = json.loads((folder / STATE_FILE).read_text())
    return _position(state.get("epoch"), per_epoch, int(state["global_step"]))


@contextmanager
def regrouped(folder: Path, position: int, per_epoch: int) -> Iterator[Path]:
    """The checkpoint for the Trainer to go on from, at step ``position``; the files themselves stay where they are."""
    with tempfile.TemporaryDirectory(prefix="fulltilt-resume-") as private:
        into = Path(private)
        for path in folder.iterdir():
            if path.name != STATE_FILE:
                (into / path.name).symlink_to(path.resolve())
        state = json.loads((folder / STATE_FILE).read_text())
        history = [
            entry | {"step": _position(entry.get("epoch"), per_epoch, entry["step"])} for entry in state["log_history"]
        ]
        told = state | {"global_step": position, "log_history": history}
        (into / STATE_FILE).write_text(json.dumps(told, indent=2) + "\n")
        yield into


def set_schedule(scheduler: Any, groups: list[dict[str, Any]], position: int) -> None:
    """Put torch's LambdaLR, which all of Hugging Face's schedules by steps are, to ``position``."""
    factors = getattr(scheduler, "lr_lambdas", None)
    if factors is None:
        return
    scheduler.last_epoch, scheduler._step_count = position, position + 1
    for group, base, factor in zip(groups, scheduler.base_lrs, factors, strict=True):
        group["lr"] = base * factor(position)
    scheduler._last_lr = [group["lr"] for group in groups]


def _position(epoch: float | None, per_epoch: int, otherwise: int) -> int:
    return otherwise if epoch is None else int(epoch * per_epoch + 1e-6)
