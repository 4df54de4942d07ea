"""Which checkpoint a run resumes from: the newest that passes its checksums, and what that loses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fulltilt.errors import MachineError
from fulltilt.train import checkpoint
from fulltilt.train.checkpoint import Checkpoint, DamagedCheckpoint


@dataclass(frozen=True, slots=True)
class Found:
    """The newest complete checkpoint, or None when there is none at all; and why newer ones were refused."""

    checkpoint: Checkpoint | None
    warnings: tuple[str, ...] = ()


def newest_complete(root: Path) -> Found:
    """Verify from the newest on until one passes. Raises MachineError when there are some and none passes."""
    refused: list[tuple[Path, str]] = []
    for folder in checkpoint.folders(root) if root.is_dir() else ():
        try:
            found = checkpoint.verify(folder)
        except DamagedCheckpoint as damage:
            refused.append((folder, damage.what))
            continue
        return Found(found, tuple(_warning(path, why, found) for path, why in refused))
    if refused:
        raise MachineError(
            f"none of the checkpoints in {root} ({len(refused)}) is intact; the newest: {refused[0][1]}",
            "Start again from nothing with --fresh, or give another one with --resume-from.",
        )
    return Found(None)


def _warning(refused: Path, why: str, taken: Checkpoint) -> str:
    lost = int(refused.name.removeprefix("step-")) - taken.step
    told = "1 step is" if lost == 1 else f"{lost} steps are"
    return f"{refused.name} is refused: {why}. Falling back to {taken.folder.name}: {told} lost."
