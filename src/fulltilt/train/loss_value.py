"""What a job's loss returned, held to what the engine needs: one number, and named means beside it.

Only shapes and types are looked at: nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fulltilt.errors import UsageError


def value_and_means(outcome: Any, device: torch.device) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[Any]]:
    """The loss, the metrics, and what else there was. Raises UsageError for what is neither."""
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
    """What ``eval_metrics`` returned, as plain numbers. Raises UsageError for what is none."""
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
