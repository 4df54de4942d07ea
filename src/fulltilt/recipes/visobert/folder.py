"""The run folder: taken for one run, and the checkpoint in it that a run goes on from."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

from fulltilt.errors import UsageError
from fulltilt.recipes.recipe import Request
from fulltilt.train import checkpoint, find
from fulltilt.train.lock import FolderLock
from fulltilt.train.progress import Screen
from fulltilt.train.resume import set_aside

STATE_FILE = "trainer_state.json"  # Hugging Face's own


def take_folder(request: Request, root: Path, screen: Screen, cleanup: contextlib.ExitStack) -> None:
    """Make the run folder ours, and clear away what is not to be gone on with. Raises UsageError, MachineError."""
    checkpoint.prepare(root)
    lock = FolderLock(request.out)
    cleanup.callback(lock.release)
    checkpoint.sweep(root)
    if request.fresh:
        shutil.rmtree(request.out / "tokenizer", ignore_errors=True)
        if (aside := set_aside(root)) is not None:
            screen.say(f"The checkpoints of the run before are now in {aside}")


def starting_point(request: Request, root: Path, screen: Screen) -> Path | None:
    """The checkpoint to go on from, None to begin. Raises UsageError, MachineError."""
    found = find.newest_complete(root)
    for warning in found.warnings:
        screen.warn(warning)
    if found.checkpoint is not None:
        return found.checkpoint.folder
    given = request.resume_from
    if given is not None and not (given / STATE_FILE).is_file():
        raise UsageError(
            f"{given} is no checkpoint of Hugging Face's Trainer: it has no {STATE_FILE}",
            "To begin with the weights of a model, give its folder as model.",
        )
    if given is not None and (given / checkpoint.MANIFEST_FILE).exists():
        checkpoint.verify(given)
    return given


def steps_of(folder: Path) -> int:
    """The step at which a checkpoint was taken."""
    return int(json.loads((folder / STATE_FILE).read_text())["global_step"])


def best(root: Path, mode: str) -> Path | None:
    """The checkpoint with the best metric; None where none has one."""
    rated = []
    for folder in checkpoint.folders(root):
        with contextlib.suppress(checkpoint.DamagedCheckpoint):
            found = checkpoint.verify(folder)
            if found.metric is not None:
                rated.append((found.metric if mode == "max" else -found.metric, folder))
    return max(rated)[1] if rated else None
