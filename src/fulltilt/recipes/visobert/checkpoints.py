"""The checkpoints of Hugging Face's Trainer in the run folder: taken over, gone on from, and what the disk refuses."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from fulltilt.errors import MachineError, UsageError
from fulltilt.recipes.recipe import Request
from fulltilt.recipes.run_folder import claim, refuse_foreign, remove_private
from fulltilt.train import checkpoint, checkpoint_files
from fulltilt.train.guards import is_out_of_memory
from fulltilt.train.progress import Screen
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
    if request.fresh and (aside := checkpoint.set_aside(root)) is not None:
        screen.say(f"The checkpoints of the run before are now in {aside}")


def starting_point(request: Request, root: Path, screen: Screen) -> Path | None:
    """The checkpoint to go on from, None to begin. Raises UsageError, MachineError."""
    found = checkpoint.newest_complete(root)
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


# What decides how many steps an epoch has.
DECISIVE = frozenset({"batch_size", "accumulation", "samples"})


def position_in(folder: Path, per_epoch: int) -> int:
    """How many steps of ``per_epoch`` an epoch lead to where ``folder`` stands; within an epoch rounded down."""
    state = json.loads((folder / STATE_FILE).read_text())
    return _position(state.get("epoch"), per_epoch, int(state["global_step"]))


@contextlib.contextmanager
def regrouped(folder: Path, position: int, per_epoch: int) -> Iterator[Path]:
    """A checkpoint of another batch size, as the Trainer would have written it with this one, at step ``position``.

    The Trainer finds the epoch by dividing its steps by those of an epoch. After a change of the batch size these are
    not the steps that were made: a run that is half done would be nearly finished. The files stay where they are.
    """
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


def expected_bytes(model: Any, optimizer: str = "") -> int:
    """About how large the model and its optimizer's state will be; of one other than torch's AdamW, without it."""
    weights: dict[int, int] = {
        tensor.data_ptr(): tensor.nbytes for tensor in model.state_dict().values()
    }  # shared ones once
    trained: int = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    return sum(weights.values()) + (2 * trained if optimizer.startswith("adamw_torch") else 0)


@contextlib.contextmanager
def refusals_told(folder: Path, needed_bytes: int) -> Iterator[None]:
    """Within it, a refused write is a MachineError. torch and safetensors keep the system's own words to themselves."""
    try:
        yield
    except OSError as error:
        raise checkpoint_files.cannot_write(Path(error.filename or folder), error, needed_bytes) from error
    except (RuntimeError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        if checkpoint_files.free_bytes(folder) < needed_bytes:
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise checkpoint_files.cannot_write(folder, full, needed_bytes) from error
        if isinstance(error, SafetensorError):
            raise MachineError(f"cannot write {folder}: {error}") from error
        raise
