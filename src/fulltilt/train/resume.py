"""Where a run begins: at its newest checkpoint, at one that was named, with foreign weights, or from nothing."""

from __future__ import annotations

import os
from pathlib import Path

from fulltilt import store
from fulltilt.errors import MachineError
from fulltilt.train import checkpoint, checkpoint_files, train_state, weight_import
from fulltilt.train.build import enter_stage, last_trained_epoch
from fulltilt.train.checkpoint import METRICS_FILE, newest_complete
from fulltilt.train.train_state import TrainState

# An optimizer's own state comes back with these as they were; a setting that was changed since has to win.
_SETTINGS_IN_GROUPS = ("weight_decay", "momentum")


def resume(state: TrainState, *, resume_from: Path | None = None, fresh: bool = False) -> None:
    """Bring the state to its starting point and say which that is. Raises FulltiltErrors."""
    if fresh and state.group.first and (aside := set_aside(state.root)) is not None:
        state.screen.say(f"The checkpoints of the run before are now in {aside}")
    state.group.barrier()
    if not fresh:
        # The first rank chooses for all: on a network disk the others may not see the newest one yet.
        found = state.group.from_first(newest_complete(state.root) if state.group.first else None)
        for warning in found.warnings:
            state.screen.warn(warning)
        if found.checkpoint is not None:
            # A run that was started with --resume-from goes on with its own checkpoints once it has some.
            _restore(state, found.checkpoint.folder)
            state.writer.newest = found.checkpoint
            return
    if resume_from is None:
        return
    source = weight_import.place_of(resume_from)
    if checkpoint.is_ours(source):
        checkpoint.verify(source)
        _restore(state, source)
    else:
        taken = weight_import.load_weights(state.model, source)
        _average_from_here(state)
        for line in taken.lines():
            state.screen.say(line)


def _restore(state: TrainState, folder: Path) -> None:
    if not folder.is_dir():
        raise MachineError(
            f"{folder}, from which the first rank goes on, is not there for rank {state.group.ranks.rank}",
            "Give an --out on storage that all machines share.",
        )
    saved = checkpoint.values(folder)
    # The optimizer has to be that of the last step before its state comes in. The next stage makes its own.
    epoch = last_trained_epoch(saved["progress"]["epoch"], saved["progress"]["consumed"])
    enter_stage(state, min(epoch, state.epochs - 1))
    groups = state.stepper.optimizer.param_groups
    asked = [{name: group[name] for name in _SETTINGS_IN_GROUPS if name in group} for group in groups]
    parts = state.parts()
    average_begins = state.ema is not None and "ema" not in saved
    if average_begins:
        del parts["ema"]
    train_state.restore(folder, state.model, parts)
    for group, wishes in zip(state.stepper.optimizer.param_groups, asked, strict=True):
        group.update({name: value for name, value in wishes.items() if name in state.kept_settings.changed})
    epoch, within = state.progress.epoch, state.progress.consumed > 0
    where = f"in epoch {epoch + 1}" if within or not epoch else f"after epoch {epoch}"
    state.screen.say(f"Resuming from {folder} (step {state.progress.step}, {where})")
    if average_begins:
        _average_from_here(state)
        state.screen.say("The average of the weights begins here: the checkpoint has none")
    if state.kept_settings.changed:
        state.screen.say(f"Changed since: {', '.join(state.kept_settings.changes)}")
    if within and "samples" in state.kept_settings.changed:
        state.screen.warn(
            f"the rest of epoch {epoch + 1} is drawn from the changed data: a sample may come twice, or not"
        )


def _average_from_here(state: TrainState) -> None:
    if state.ema is not None:
        state.ema.load_state_dict({name: parameter.detach() for name, parameter in state.model.named_parameters()})


def set_aside(root: Path) -> Path | None:
    """Give old checkpoints and their metrics other names, so that a fresh run is not taken for theirs.

    Returns the checkpoints' new place; None when there are none.
    """
    if not checkpoint.folders(root):
        return None
    number = 1
    log = root.with_name(METRICS_FILE)
    while True:
        aside, log_aside = root.with_name(f"{root.name}.old-{number}"), log.with_stem(f"{log.stem}.old-{number}")
        if not (os.path.lexists(aside) or os.path.lexists(log_aside)):
            break
        number += 1
    folder = store.OwnedFolder.around(root)
    assert folder is not None, "the folder was claimed at the start"
    checkpoint_files.rename(folder, root, aside)
    checkpoint.prepare(root)
    # Its epochs are no part of the fresh run's history, which forecasts are made from.
    if folder.owns(log):
        checkpoint_files.rename(folder, log, log_aside)
    return aside
