"""A training job: model, loss, data and stages; and checks of what its loss returned."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch

from fulltilt.errors import UsageError
from fulltilt.train.config import TrainSettings

Loss = Callable[[torch.nn.Module, Any], "torch.Tensor | tuple[torch.Tensor, Mapping[str, torch.Tensor]]"]
EvalLoss = Callable[
    [torch.nn.Module, Any],
    "torch.Tensor | tuple[torch.Tensor, Mapping[str, torch.Tensor]]"
    " | tuple[torch.Tensor, Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]",
]
# Metrics of the whole set (AUROC, recall), from the rows that ``eval_loss`` returned for every sample.
WholeSetMetrics = Callable[[dict[str, torch.Tensor]], Mapping[str, float]]
MakeOptimizer = Callable[[torch.nn.Module, TrainSettings, torch.device], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Stage:
    """Some epochs with their own optimizer, learning rate, batch size and trainable parameters. None: as the run's.

    ``frozen`` are patterns of parameter names (``backbone.*``); ``unfreeze`` gives, for an epoch of the stage, a
    pattern that becomes trainable from then on.
    """

    name: str
    epochs: int
    lr: float | None = None
    batch_size: int | None = None
    frozen: tuple[str, ...] = ()
    unfreeze: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained.

    ``loss(model, batch)`` returns the mean loss over the batch, and with it, if you like, a dict of metrics as means
    over the batch. ``data`` and ``eval_data`` are map-style data sets (``len`` and ``[i]``: shuffled, divided and
    resumed exactly by the engine) or iterables of ready batches, such as a DataLoader. ``optimizer(model, settings,
    device)`` replaces the optimizer of the settings; the schedule scales the rates of its groups together.
    Parameters that are frozen stay so, unless a stage names them in ``unfreeze``.
    ``splittable`` is False for a loss that compares the samples of a batch with each other (contrastive): halving such
    a batch would change what is trained.
    ``augment`` runs on the device: transforms of ``fulltilt.feed.augment``, or a function of the batch;
    ``eval_augment`` is what ``eval_data`` gets in its place (the middle crop, the same normalisation).
    A ``joint`` loss takes all micro-batches of a step as a list, compares across them and bounds its own memory to one
    of them; accumulation and a halved micro-batch then leave what is trained unchanged.
    ``eval_loss`` may return a third part, tensors with one row a sample; ``eval_metrics`` then gets those of all
    samples and ranks, in any order, and returns metrics of the whole set.
    ``made_from``: plain values that a resume compares with the saved ones, and reports those that changed.
    """

    model: torch.nn.Module
    loss: Loss
    data: Sequence[Any] | torch.utils.data.Dataset[Any] | Iterable[Any]
    eval_data: Sequence[Any] | torch.utils.data.Dataset[Any] | Iterable[Any] | None = None
    eval_loss: EvalLoss | None = None
    eval_metrics: WholeSetMetrics | None = None
    optimizer: MakeOptimizer | None = None
    stages: tuple[Stage, ...] = ()
    collate: Callable[[list[Any]], Any] | None = None
    augment: Any = None
    eval_augment: Any = None
    splittable: bool = True
    joint: bool = False
    name: str = "training"
    made_from: Mapping[str, Any] = field(default_factory=dict)


def samples_in(data: Any) -> int | None:
    """The number of samples, or None. Iterables of batches do not have it, except the feed's loaders."""
    if hasattr(data, "__getitem__"):
        try:
            return len(data)
        except Exception:  # the user's own code
            return None
    samples = getattr(getattr(data, "source", None), "samples", None)
    return samples if isinstance(samples, int) else None


# --------------------------------------------------------------------------- stages


def stage_at(stages: tuple[Stage, ...], epoch: int) -> tuple[int, int]:
    """The index of the stage of ``epoch``, and the epoch within that stage."""
    index = 0
    while index < len(stages) - 1 and epoch >= stages[index].epochs:
        epoch -= stages[index].epochs
        index += 1
    return index, epoch


def trainable(
    names: Iterable[str], stage: Stage, epoch_in_stage: int, initially_frozen: Collection[str] = ()
) -> set[str]:
    """The names of the parameters that are trained in this epoch of the stage.

    Parameters that the job itself froze are trained only where ``unfreeze`` names them.
    """
    thawed = [pattern for epoch, pattern in stage.unfreeze if epoch_in_stage >= epoch]
    return {
        name
        for name in names
        if any(fnmatchcase(name, pattern) for pattern in thawed)
        or not (name in initially_frozen or any(fnmatchcase(name, pattern) for pattern in stage.frozen))
    }


# --------------------------------------------------------------------------- what the loss returned


def value_and_means(outcome: Any, device: torch.device) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[Any]]:
    """The loss, the metrics, and further parts. Raises UsageError for anything else."""
    parts = list(outcome) if isinstance(outcome, tuple) else [outcome, {}]
    if len(parts) < 2 or not isinstance(parts[1], Mapping):
        found = f"({', '.join(_kind(part) for part in parts)})" if isinstance(outcome, tuple) else _kind(outcome)
        raise UsageError(f"the loss returned {found}", "Return the loss, or the loss and a dict of metrics.")
    means = {str(name): _number(mean, f"the metric {name}", device) for name, mean in parts[1].items()}
    return _number(parts[0], "the loss", device), means, parts[2:]


def with_gradient(loss: torch.Tensor) -> torch.Tensor:
    """The loss itself. Raises UsageError when no gradient flows from it."""
    if not loss.requires_grad:
        raise UsageError(
            "no gradient flows from the loss: it does not depend on a parameter that is trained",
            "Look for detach(), .item(), torch.no_grad() or numpy on the way from the model to the loss.",
        )
    return loss


def plain_metrics(found: Any) -> dict[str, float]:
    """What ``eval_metrics`` returned, as plain numbers. Raises UsageError for anything else."""
    if not isinstance(found, Mapping):
        raise UsageError(f"eval_metrics returned {_kind(found)}", "Return a dict of numbers by name.")
    host = torch.device("cpu")
    return {str(name): float(_number(value, f"the metric {name}", host)) for name, value in found.items()}


def _number(value: Any, what: str, device: torch.device) -> torch.Tensor:
    if isinstance(value, int | float):
        return torch.tensor(float(value), device=device)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value if value.ndim == 0 else value.reshape(())
    if hasattr(value, "item") and getattr(value, "size", 0) == 1:  # a number of numpy's
        return torch.tensor(float(value.item()), device=device)
    raise UsageError(f"{what} should be one number, not {_kind(value)}", "Return means over the batch.")


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"
