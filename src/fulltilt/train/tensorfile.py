"""Tensors as a safetensors file, written in one streaming pass; read back by the safetensors library itself.

The library's own writer copies everything into one bytes object while it holds the interpreter's lock, which would
stall the training loop beside it. Here each tensor's memory goes to the disk as it lies.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fulltilt.errors import UsageError

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
}


def parts(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file: its header, then each tensor's memory. The tensors are on the host."""
    yield _header(tensors)
    for tensor in tensors.values():
        dense = tensor.detach().contiguous()
        if dense.numel():
            memory = (ctypes.c_ubyte * dense.nbytes).from_address(dense.data_ptr())
            yield memoryview(memory)


def size_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """How many bytes the file of ``tensors`` will have."""
    return len(_header(tensors)) + sum(tensor.nbytes for tensor in tensors.values())


def _header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    entries: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPE_NAMES:
            raise UsageError(
                f"cannot save {name}: tensors of type {tensor.dtype} have no place in safetensors",
                "Keep it as torch.view_as_real(...), or as a buffer that is not persistent.",
            )
        entries[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data that follows is aligned
    return len(text).to_bytes(8, "little") + text


def read(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, on the host. Raises OSError or ValueError for a damaged one."""
    safetensors_torch = require_safetensors()
    try:
        return dict(safetensors_torch.load_file(path))
    except OSError:
        raise
    except Exception as error:  # the library raises a type of its own for a bad header
        raise ValueError(f"{path.name} is not a safetensors file: {error}") from error


def require_safetensors() -> Any:
    """The safetensors library, or a UsageError that says what to install."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise UsageError("checkpoints need safetensors", "Install it with: pip install 'fulltilt[train]'") from error
    return safetensors.torch
