"""Where a run begins: at its newest checkpoint, at one that was named, with foreign weights, or from nothing."""

from __future__ import annotations

from pathlib import Path

from fulltilt.train import checkpoint, durable, find, foreign, state
from fulltilt.train.setup import Rig, enter_stage


def resume(rig: Rig, *, resume_from: Path | None = None, fresh: bool = False) -> None:
    """Bring the rig to its starting point and say which that is. Raises FulltiltErrors."""
    if fresh and rig.group.first and (aside := set_aside(rig.root)) is not None:
        rig.screen.say(f"The checkpoints of the run before are now in {aside}")
    rig.group.barrier()
    if not fresh:
        found = find.newest_complete(rig.root)
        for warning in found.warnings:
            rig.screen.warn(warning)
        if found.checkpoint is not None:
            # A run that was started with --resume-from goes on with its own checkpoints once it has some.
            _restore(rig, found.checkpoint.folder)
            return
    if resume_from is None:
        return
    if (resume_from / checkpoint.MANIFEST_FILE).exists():
        _restore(rig, resume_from)
    else:
        taken = foreign.load_weights(rig.model, resume_from)
        if rig.ema is not None:
            rig.ema.load_state_dict(dict(rig.model.named_parameters()))
        for line in taken.lines():
            rig.screen.say(line)


def _restore(rig: Rig, folder: Path) -> None:
    epoch = checkpoint.verify(folder).epoch
    enter_stage(rig, min(epoch, rig.epochs - 1))  # the optimizer has to be the stage's own before its state comes in
    state.restore(folder, rig.model, rig.parts())
    progress = rig.progress
    rig.writer.newest = checkpoint.verify(folder) if folder.parent == rig.root else None
    rig.screen.say(f"Resuming from {folder} (step {progress.step}, epoch {progress.epoch + 1})")
    if rig.kept_settings.changes:
        rig.screen.say(f"Changed since: {', '.join(rig.kept_settings.changes)}")


def set_aside(root: Path) -> Path | None:
    """Give old checkpoints another name, so that a fresh run is not taken for theirs; None when there are none."""
    if not checkpoint.folders(root):
        return None
    number = 1
    while (aside := root.with_name(f"{root.name}.old-{number}")).exists():
        number += 1
    durable.rename(root, aside)
    checkpoint.prepare(root)
    return aside
