"""Sums over large tensors while a batch is fetched: other numbers of threads add them up in other orders."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# From here on torch divides a reduction to one number among its threads (at::internal::GRAIN_SIZE).
LARGE = 32768
SUMS = frozenset(
    {"sum", "nansum", "mean", "prod", "norm", "linalg_vector_norm", "std", "var", "std_mean", "var_mean", "logsumexp"}
)


class LargeSums(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operations of torch inside its ``with``. ``seen`` is the name of one whose rounding may differ.

    Such a sum is one number, which comes out the same more often than not: repeating a few batches would not show it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for each operation."""
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in SUMS and isinstance(args[0], torch.Tensor) and args[0].numel() >= LARGE:
            first = result[0] if isinstance(result, tuple) else result
            if first.numel() == 1 and (first.is_floating_point() or first.is_complex()):
                self.seen = name
        return result
