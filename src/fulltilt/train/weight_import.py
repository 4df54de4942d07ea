"""Loads weights from a checkpoint folder or another trainer's `.pth` or `.safetensors`, as far as they fit.

Pickles are loaded with ``weights_only`` alone.
"""

from __future__ import annotations

import pickle
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fulltilt.errors import DataError, UsageError
from fulltilt.figures import listed
from fulltilt.store import open_plain
from fulltilt.train import checkpoint, checkpoint_format
from fulltilt.train.checkpoint import newest_complete
from fulltilt.train.distributed import sharded_like

# Where trainers put the weights inside their own checkpoint dicts.
_WEIGHT_KEYS = (
    *("model_state_dict", "state_dict", "model_state", "model", "net", "network", "weights", "params", "module"),
    *("ema_state_dict", "model_ema", "params_ema", "ema"),
)
# Where Hugging Face puts them in a folder.
_FOLDER_FILES = ("model.safetensors", "pytorch_model.bin")
_WHAT_TO_GIVE = "Give a checkpoint folder, or a file of weights."


@dataclass(frozen=True, slots=True)
class WeightMatch:
    """Names in a file of weights: taken, missing, unexpected, and of another shape."""

    source: str
    taken: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether the names and shapes of file and model are the same."""
        return not (self.missing or self.unexpected or self.mismatched)

    def lines(self, most: int = 5) -> list[str]:
        """What was taken and what not, in words."""
        lines = [f"{self.source}: {len(self.taken)} tensors taken"]
        for title, names in (
            ("missing in the file", self.missing),
            ("unexpected in the file", self.unexpected),
            ("of another shape", self.mismatched),
        ):
            if names:
                lines.append(f"{len(names)} {title}: {listed(names, most)}")
        return lines


def compare(model: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor], source: str) -> WeightMatch:
    """Which of the given tensors fit the model. Pure."""
    mismatched = {name for name in model.keys() & given.keys() if model[name].shape != given[name].shape}
    return WeightMatch(
        source,
        taken=tuple(name for name in model if name in given and name not in mismatched),
        missing=tuple(name for name in model if name not in given),
        unexpected=tuple(name for name in given if name not in model),
        mismatched=tuple(
            f"{name} ({_shape(given[name])} in the file, {_shape(model[name])} here)"
            for name in model
            if name in mismatched
        ),
    )


def _shape(tensor: torch.Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "a number"


def load_weights(model: torch.nn.Module, path: Path) -> WeightMatch:
    """Load what fits from ``path`` into ``model``. Raises UsageError where nothing does."""
    own = model.state_dict()
    given = _without_prefix(read_weights(path), own)
    plan = compare(own, given, str(path))
    if not plan.taken:
        raise UsageError("; ".join(plan.lines()), "Give a checkpoint of the same model with --resume-from.")
    model.load_state_dict({name: sharded_like(given[name], own[name]) for name in plan.taken}, strict=False)
    return plan


def place_of(path: Path) -> Path:
    """The newest checkpoint for the folder of a run; any other path itself.

    Raises UsageError when nothing is there, MachineError when no checkpoint of a run is intact.
    """
    if not path.exists():
        raise UsageError(f"{path} does not exist", _WHAT_TO_GIVE)
    for root in (path / "checkpoints", path):
        if root.is_dir() and checkpoint.folders(root) and (found := newest_complete(root).checkpoint):
            return found.folder
    return path


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The named tensors of a checkpoint folder or file. Raises UsageError, DataError, MachineError."""
    path = place_of(path)
    if (path / checkpoint.MANIFEST_FILE).exists():
        return checkpoint.load(path)[0]
    if path.is_dir():
        there = [path / name for name in _FOLDER_FILES if (path / name).is_file()]
        if not there:
            raise DataError(f"{path} is not a checkpoint folder and has no {' or '.join(_FOLDER_FILES)}", _WHAT_TO_GIVE)
        path = there[0]
    return _weights_in(_content(path), path)


def _content(path: Path) -> Any:
    try:
        with open_plain(path, follow=True) as file:
            head = file.read(2)
        if path.suffix == ".safetensors":
            return checkpoint_format.read_tensors(path)
        if head != b"PK" and not head.startswith(b"\x80"):  # neither torch's zip nor a pickle
            raise DataError(f"{path} is {'no checkpoint' if head else 'empty'}: torch.save has not written it")
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise DataError(
            f"{path} is refused: it holds more than weights ({reason(error)}), and loading it could run code",
            "Export its weights with safetensors, or torch.save(model.state_dict()).",
        ) from error
    except (OSError, ValueError, EOFError, RuntimeError, KeyError, AttributeError, TypeError, IndexError) as error:
        raise DataError(f"{path} cannot be read: {reason(error)}") from error


def reason(error: Exception) -> str:
    """The cause in an error of torch or safetensors, without the library's advice."""
    refused = re.search(r"GLOBAL (\S+)", str(error))
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return refused[1] if refused else first.partition(". ")[0][:120]


def _weights_in(content: Any, path: Path) -> dict[str, torch.Tensor]:
    if isinstance(content, dict):
        for key in _WEIGHT_KEYS:
            inner = content.get(key)
            if isinstance(inner, Mapping) and any(isinstance(value, torch.Tensor) for value in inner.values()):
                content = inner
                break
        tensors = {str(name): value for name, value in content.items() if isinstance(value, torch.Tensor)}
        if tensors:
            return tensors
    raise DataError(f"{path} holds no weights", f"Its weights should be the file itself or under {_WEIGHT_KEYS[0]}.")


def _without_prefix(given: dict[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Strip the prefix (of DataParallel, torch.compile, Lightning) that makes most names fit.

    Not every name has it: Lightning also saves losses and metrics.
    """
    fitting: Counter[str] = Counter()
    for name in given:
        parts = name.split(".")
        cuts = (cut for cut in range(len(parts)) if ".".join(parts[cut:]) in own)
        fitting.update("".join(f"{part}." for part in parts[:cut]) for cut in cuts)
    prefix = max(fitting, key=lambda one: (fitting[one], -len(one)), default="")
    return {name.removeprefix(prefix): tensor for name, tensor in given.items()}
