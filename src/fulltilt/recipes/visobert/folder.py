"""The run folder: taken for one run, and the checkpoint in it that a run goes on from."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from fulltilt.errors import UsageError
from fulltilt.recipes.recipe import Request
from fulltilt.recipes.run_folder import claim, refuse_foreign, remove_private
from fulltilt.train import checkpoint, checkpoint_files
from fulltilt.train.checkpoint import newest_complete
from fulltilt.train.progress import Screen
from fulltilt.train.resume import set_aside
from fulltilt.train.weight_import import compare

STATE_FILE = "trainer_state.json"  # Hugging Face's own
OPTIMIZER_FILE = "optim.json"  # which optimizer the state is of, after how many steps, and the settings of that run
LOSSES_FILE = "losses.json"  # of the epoch so far, whose mean is told at its end


def take_folder(request: Request, root: Path, screen: Screen, cleanup: contextlib.ExitStack) -> None:
    """Make the run folder ours, and clear away what is not to be gone on with. Raises UsageError, MachineError."""
    folder = claim(request.out)
    for name in ("tokenizer", "model"):
        refuse_foreign(request.out / name)
    cleanup.enter_context(folder.locked(f"another training uses {request.out}"))
    checkpoint.prepare(root)
    remove_private(folder, f"{root.name}/.partial-*")
    checkpoint.sweep(root)
    if request.fresh and (aside := set_aside(root)) is not None:
        screen.say(f"The checkpoints of the run before are now in {aside}")


def starting_point(request: Request, root: Path, screen: Screen) -> Path | None:
    """The checkpoint to go on from, None to begin. Raises UsageError, MachineError."""
    found = newest_complete(root)
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


def refuse_other(folder: Path, model: Any, optimizer: str) -> None:
    """Raise UsageError for a checkpoint of another model, or of an optimizer whose state this one cannot go on with."""
    own = model.state_dict()
    weights = sorted(folder.glob("model*.safetensors"))
    given = {name: tensor for path in weights for name, tensor in checkpoint_files.read_tensors(path).items()}
    fit = compare(own, given, str(folder))
    # Of weights that share their memory only one is saved.
    there = {own[name].data_ptr() for name in fit.taken}
    missing = tuple(name for name in fit.missing if own[name].data_ptr() not in there)
    # Names on both sides that the other lacks may be Hugging Face's old and new names of the same weights.
    if weights and (fit.mismatched or bool(missing) != bool(fit.unexpected)):
        told = "; ".join(replace(fit, missing=missing).lines(most=2))
        raise UsageError(
            f"this is the checkpoint of another model: {told}",
            "Give the settings of that model, another --out, or --fresh.",
        )
    with contextlib.suppress(OSError, ValueError, KeyError):
        before = json.loads((folder / OPTIMIZER_FILE).read_text())["optim"]
        if _family(before) != _family(optimizer):
            raise UsageError(
                f"{folder} was trained with optim: {before}, whose state {optimizer} cannot go on with",
                f"Set optim: {before}, or begin anew with --fresh.",
            )


def _family(optimizer: str) -> str:
    return optimizer.removesuffix("_fused")  # the same state, computed in fewer kernels


def steps_of(folder: Path) -> int:
    """The step at which a checkpoint was taken, as the Trainer counts: by the length of an epoch of that time."""
    return int(json.loads((folder / STATE_FILE).read_text())["global_step"])


def steps_made(folder: Path) -> int:
    """The optimizer steps that led to a checkpoint, whatever they held."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads((folder / OPTIMIZER_FILE).read_text())["steps"])
    return steps_of(folder)


def settings_of(folder: Path) -> dict[str, Any]:
    """The settings that a checkpoint was made with; none where nobody wrote them down."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return dict(json.loads((folder / OPTIMIZER_FILE).read_text())["settings"])
    return {}


def losses_of(folder: Path) -> list[float]:
    """The losses of the epoch that a checkpoint was taken in; none where nobody wrote them down."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return [float(loss) for loss in json.loads((folder / LOSSES_FILE).read_text())]
    return []


def best(root: Path, mode: str) -> Path | None:
    """The checkpoint with the best metric; None where none has one."""
    rated = []
    for folder in checkpoint.folders(root):
        with contextlib.suppress(checkpoint.DamagedCheckpoint):
            found = checkpoint.verify(folder)
            if found.metric is not None:
                rated.append((found.metric if mode == "max" else -found.metric, folder))
    return max(rated)[1] if rated else None
