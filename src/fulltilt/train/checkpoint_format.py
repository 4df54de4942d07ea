"""The files of a checkpoint: tensors as safetensors, state as JSON, all flushed to disk and with checksums.

Every write, fsync and rename of a checkpoint goes through here, so that a test can kill the process at each of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fulltilt.errors import MachineError, UsageError
from fulltilt.store import OwnedFolder, open_plain

# Small enough that a write never holds a page-cache lock for long, large enough that the call itself costs nothing.
CHUNK_BYTES = 16 * 2**20
# torch.distributed.checkpoint's own name for the index of the shards.
SHARDS_FILE = ".metadata"

FileSum = dict[str, Any]  # the bytes and the sha256 of a file, as the manifest has them


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> FileSum:
    """Write a new file and flush it to the disk; hashing happens in the same pass. Raises OSError."""
    digest = hashlib.sha256()
    written = 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    try:
        for part in parts:
            view = memoryview(part).cast("B")
            for start in range(0, len(view), CHUNK_BYTES):
                chunk = view[start : start + CHUNK_BYTES]
                digest.update(chunk)
                written += len(chunk)
                while chunk:
                    chunk = chunk[os.write(fd, chunk) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    return {"bytes": written, "sha256": digest.hexdigest()}


def hash_file(path: Path) -> FileSum:
    """The size and SHA-256 of a file as it is now. Raises OSError."""
    with open_plain(path) as file:
        digest = hashlib.file_digest(file, "sha256")
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}


def sync(folder: Path) -> None:
    """Flush the names in ``folder`` to the disk. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def rename(folder: OwnedFolder, old: Path, new: Path) -> None:
    """Rename an entry of a folder of ours and flush that folder. Raises ForeignFiles, OSError."""
    folder.move(old, new)
    sync(new.parent)


@contextlib.contextmanager
def refusals_told(path: Path, needed_bytes: int | None = None) -> Iterator[None]:
    """Turns a failed write into a MachineError; ``needed_bytes``: of the whole checkpoint."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error, needed_bytes) from error


def refused_write(error: BaseException, out: Path) -> MachineError | None:
    """The error for a full disk under ``out``; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return None
    return cannot_write(Path(os.fsdecode(error.filename)) if isinstance(error.filename, (str, bytes)) else out, error)


def cannot_write(path: Path, error: OSError, needed_bytes: int | None = None) -> MachineError:
    """The error for a failed write: the cause, the file, and what to change."""
    cause = error.strerror or str(error)
    if error.errno == errno.EFBIG:
        return MachineError(
            f"cannot write {path}: it would pass the file-size limit ({needed_bytes or 0:,} bytes needed)",
            "Raise it with `ulimit -f unlimited`, or choose another folder with --out.",
        )
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(path if path.is_dir() else path.parent).free
        needed = f"{needed_bytes:,} bytes needed, " if needed_bytes else ""
        return MachineError(
            f"cannot write {path}: {cause} ({needed}{free:,} free)",
            "Free some space, keep fewer checkpoints (keep_last, keep_best), or choose another folder with --out.",
        )
    return MachineError(f"cannot write {path}: {cause}", "Make the folder writable or choose another one with --out.")


# --------------------------------------------------------------------------- tensors as safetensors
# The library's own writer copies everything into one bytes object while it holds the GIL, which would stall the
# training loop. Here each tensor's memory is written directly.


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


def tensor_parts(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file: its header, then each tensor's memory. The tensors are on the host."""
    yield _tensor_header(tensors)
    for tensor in tensors.values():
        dense = tensor.detach().contiguous()
        if dense.numel():
            memory = (ctypes.c_ubyte * dense.nbytes).from_address(dense.data_ptr())
            yield memoryview(memory)


def tensor_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """How many bytes the file of ``tensors`` will have."""
    return len(_tensor_header(tensors)) + sum(tensor.nbytes for tensor in tensors.values())


def _tensor_header(tensors: Mapping[str, torch.Tensor]) -> bytes:
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


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, on the host. Raises OSError or ValueError for a damaged one."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise UsageError("checkpoints need safetensors", "Install it with: pip install 'fulltilt[train]'") from error
    try:
        return dict(safetensors.torch.load_file(path))
    except OSError:
        raise
    except Exception as error:  # the library raises a type of its own for a bad header
        raise ValueError(f"{path.name} is not a safetensors file: {error}") from error


# --------------------------------------------------------------------------- state as plain values and named tensors
# Nothing needs unpickling: a tensor becomes {"$tensor": name}, tuples and dicts with other keys are marked likewise.


def flatten_state(tree: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Split ``tree`` into plain values and its tensors by path. Raises UsageError for any other value."""
    tensors: dict[str, torch.Tensor] = {}
    return _flatten(tree, "state", tensors), tensors


def _flatten(node: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(node, torch.Tensor):
        tensors[path] = node
        return {"$tensor": path}
    if node is None or type(node) in (bool, int, float, str):
        return node
    if isinstance(node, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in node):
            return {key: _flatten(value, f"{path}/{key}", tensors) for key, value in node.items()}
        if all(type(key) in (bool, int, float, str) for key in node):
            return {"$items": [[key, _flatten(value, f"{path}/{key!r}", tensors)] for key, value in node.items()]}
        raise UsageError(f"cannot save {path}: a dict has keys that are neither numbers nor text")
    if isinstance(node, list):
        return [_flatten(value, f"{path}/{i}", tensors) for i, value in enumerate(node)]
    if isinstance(node, tuple):
        return {"$tuple": [_flatten(value, f"{path}/{i}", tensors) for i, value in enumerate(node)]}
    raise UsageError(
        f"cannot save {path}: {type(node).__name__} is neither a tensor nor a plain value",
        "Keep only tensors, numbers, text, lists and dicts in state_dict().",
    )


def unflatten_state(plain: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The tree that ``flatten_state`` split. Raises KeyError when a tensor is missing."""
    if isinstance(plain, list):
        return [unflatten_state(value, tensors) for value in plain]
    if not isinstance(plain, dict):
        return plain
    if "$tensor" in plain:
        return tensors[plain["$tensor"]]
    if "$tuple" in plain:
        return tuple(unflatten_state(value, tensors) for value in plain["$tuple"])
    if "$items" in plain:
        return {key: unflatten_state(value, tensors) for key, value in plain["$items"]}
    return {key: unflatten_state(value, tensors) for key, value in plain.items()}
