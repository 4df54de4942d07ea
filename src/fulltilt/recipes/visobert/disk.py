"""What a checkpoint of the Trainer takes on the disk, and what is said when the disk refuses it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from fulltilt.errors import MachineError
from fulltilt.train import checkpoint_files
from fulltilt.train.guards import is_out_of_memory


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
