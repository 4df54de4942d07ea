"""How a run of the Trainer ends: with its last metrics, or with an error that says what to change."""

from __future__ import annotations

from pathlib import Path

from fulltilt.errors import DoesNotFit, UsageError
from fulltilt.train.weight_import import reason


def last_metrics(history: list[dict[str, float]]) -> dict[str, float]:
    """Those of the last evaluation in the Trainer's history."""
    last = next((entry for entry in reversed(history) if "eval_loss" in entry), {})
    return {name: value for name, value in last.items() if name.startswith("eval_")}


def does_not_fit(batch_size: int) -> DoesNotFit:
    """The error for memory that ran out."""
    return DoesNotFit(
        f"memory ran out with batches of {batch_size}",
        f"Set per_device_train_batch_size: {max(batch_size * 5 // 6, 1)}, gradient_checkpointing: true,"
        " a smaller per_device_eval_batch_size, or optim: adamw_bnb_8bit.",
    )


def holds_code(folder: Path, error: Exception) -> UsageError:
    """The error for a checkpoint that is refused because loading it could run code."""
    return UsageError(
        f"{folder} is refused: it holds more than tensors, and loading it could run code ({reason(error)})",
        "To begin with its weights alone, give the folder as model.",
    )
