"""Gradient checkpointing: activations computed again in backward instead of kept, where the model offers it."""

from __future__ import annotations

import torch

from fulltilt.errors import UsageError


def recompute(model: torch.nn.Module) -> None:
    """Switch it on. Raises UsageError when the model has no switch for it."""
    for name in ("gradient_checkpointing_enable", "set_grad_checkpointing"):  # Hugging Face, timm
        if callable(switch := getattr(model, name, None)):
            switch()
            return
    raise UsageError(
        f"gradient_checkpointing: {type(model).__name__} does not offer it",
        "Give the model a method gradient_checkpointing_enable(), or leave the setting out.",
    )
