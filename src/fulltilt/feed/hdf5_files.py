"""HDF5 files as one long table, read through h5py in blocks of whole chunks.

A data set read with ``h5[i]`` decompresses a whole chunk for one sample; a block reads each of its chunks once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fulltilt.errors import DataError, UsageError
from fulltilt.feed.sample_reader import Failure

# Large enough to amortise a read call and a copy, and small enough for several in memory.
BLOCK_BYTES = 8 * 1024**2
# Blocks hold a multiple of so many rows, so that every key in a block is aligned.
ROWS_ALIGNMENT = 16
DAMAGED = "The file is cut off or damaged, or links to a missing one: copy it again."


def require_h5py() -> Any:
    """The module h5py. Raises UsageError with the line that installs it."""
    try:
        import h5py
    except ImportError as error:
        raise UsageError("reading HDF5 needs h5py", "Install it with: pip install 'fulltilt[hdf5]'") from error
    return h5py


@dataclass(frozen=True)
class Column:
    """One key of the files: shape and dtype of its rows."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    row_bytes: int
    chunk_rows: int

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{kind}[{', '.join(map(str, self.shape))}]" if self.shape else kind


@dataclass(frozen=True)
class RowBlock:
    """Consecutive rows of one file: those of all samples that begin in some of its chunks."""

    file: str
    row: int
    rows: int
    first_sample: int
    samples: int


@dataclass(frozen=True)
class Hdf5Table:
    """Files and keys as one long table. Sample s is ``window`` rows from row ``s * stride`` on, within one file.

    Of each file ``rows`` rows are used, from row ``first`` on.
    """

    files: tuple[str, ...]
    rows: tuple[int, ...]
    columns: tuple[Column, ...]
    window: int | None
    stride: int
    first: tuple[int, ...]

    @property
    def samples(self) -> int:
        """Samples of all files; no window spans two files."""
        return sum(self._samples_of(count) for count in self.rows)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over all keys."""
        return sum(column.row_bytes for column in self.columns)

    def _samples_of(self, rows: int) -> int:
        return max(0, (rows - (self.window or 1)) // self.stride + 1)

    def blocks(self, block_bytes: int = BLOCK_BYTES) -> list[RowBlock]:
        """All samples in blocks: one for those that begin in the same few chunks."""
        chunk = max(column.chunk_rows for column in self.columns)
        size = max(1, block_bytes // self.row_bytes // chunk) * chunk
        found: list[RowBlock] = []
        before = 0
        for file, start, count in zip(self.files, self.first, self.rows, strict=True):
            samples = self._samples_of(count)
            for low in range(start // size * size, start + count, size):
                first, end = (max(0, -((start - edge) // self.stride)) for edge in (low, low + size))
                here = min(end, samples) - first
                if here > 0:
                    rows = (here - 1) * self.stride + (self.window or 1)
                    found.append(RowBlock(file, start + first * self.stride, rows, before + first, here))
            before += samples
        return found


def describe(
    files: Sequence[str | Path] | str | Path,
    keys: Sequence[str],
    window: int | None,
    stride: int,
    part: tuple[float, float] = (0.0, 1.0),
) -> Hdf5Table:
    """Describe the files without reading rows; ``part`` is the share of each file's rows to use, from and to.

    Raises UsageError for wrong names, DataError for damage.
    """
    names = [str(name) for name in ([files] if isinstance(files, str | Path) else files)]
    if not names or not keys:
        raise UsageError("no HDF5 file or no key was given")
    if stride < 1 or (window is not None and window < 1):
        raise UsageError(f"window {window} and stride {stride} must be at least 1")
    if not 0 <= part[0] < part[1] <= 1:
        raise UsageError(f"part {part} is not a range within 0 to 1")
    rows: list[int] = []
    columns: list[Column] = []
    for name in names:
        count, here = _rows_and_columns(name, keys)
        rows.append(count)
        columns = columns or here
        for own, other in zip(here, columns, strict=True):
            if str(own) != str(other):
                raise DataError(
                    f"{name}: rows of {own.key!r} are {own}, but {other} in {names[0]}",
                    "Store them alike in every file, or leave that file out.",
                )
    first, last = ([round(share * count) for count in rows] for share in part)
    used = tuple(end - start for start, end in zip(first, last, strict=True))
    source = Hdf5Table(tuple(names), used, tuple(columns), window, stride, tuple(first))
    if source.samples == 0:
        length = "" if window is None else f" for windows of {window}"
        raise DataError(
            f"{', '.join(names[:3])}: no sample in {sum(used)} of {sum(rows)} rows{length}",
            "More rows are needed, a shorter window, or another share of the files.",
        )
    return source


def _rows_and_columns(name: str, keys: Sequence[str]) -> tuple[int, list[Column]]:
    """How many rows a file has, and what each key holds. Raises UsageError, DataError."""
    if not Path(name).exists():
        raise UsageError(f"the HDF5 file {name} does not exist")
    if not Path(name).is_file():  # h5py would hang on a pipe
        raise UsageError(f"the HDF5 file {name} is not a regular file")
    try:
        with require_h5py().File(name, "r") as file:
            columns = [_column(file, name, key) for key in keys]
            lengths = {key: file[key].shape[0] for key in keys}
    except BlockingIOError as error:
        raise DataError(f"{name} is locked: {error}", "Close it where it is being written.") from error
    except (OSError, KeyError) as error:
        raise DataError(f"{name} cannot be read as HDF5: {error}", DAMAGED) from error
    if len(set(lengths.values())) > 1:
        raise DataError(f"{name}: its keys differ in length: {lengths}", "Each row needs a value under every key.")
    return lengths[keys[0]], columns


def _column(file: Any, name: str, key: str) -> Column:
    import numpy

    if key not in file:
        raise UsageError(f"{name} has no key {key!r}", f"It has: {', '.join(sorted(file)) or 'none'}.")
    data = file[key]
    if not getattr(data, "shape", None):
        inside = (
            f"It holds: {', '.join(f'{key}/{inner}' for inner in sorted(data))}." if hasattr(data, "keys") else None
        )
        raise UsageError(f"{name}: {key!r} is not an array of rows, but a group or a single value", inside)
    if data.is_virtual:  # h5py gives zeros in the place of a source that is missing
        raise UsageError(f"{name}: {key!r} is a virtual data set", "Give the files that it is made of.")
    try:
        # Rows are read in the machine's byte order.
        dtype = torch.from_numpy(numpy.empty(0, dtype=data.dtype.newbyteorder("="))).dtype
    except TypeError as error:
        raise DataError(
            f"{name}: {key!r} holds {_kind(data.dtype)}, not numbers of one kind and rows of one length",
            "Store it as integers or floating-point numbers, padded to one length, or give another key.",
        ) from error
    shape = tuple(int(size) for size in data.shape[1:])
    if 0 in shape:
        raise DataError(f"{name}: the rows of {key!r} are empty: its shape is {data.shape}", "Give another key.")
    row_bytes = math.prod(shape) * int(data.dtype.itemsize)
    return Column(key, shape, dtype, row_bytes, int(data.chunks[0]) if data.chunks else 1)


def _kind(dtype: Any) -> str:
    """A dtype that is not numeric, in words."""
    if dtype.names:
        return f"records of {', '.join(dtype.names)}"
    if (dtype.metadata or {}).get("vlen") in (str, bytes) or dtype.kind in "SU":
        return "strings"
    return "rows of differing length" if (dtype.metadata or {}).get("vlen") is not None else str(dtype)


class BlockReader:
    """Reads blocks by number for a WorkerPool; the bytes of a block hold its keys one after the other.

    Each process opens the files itself: a handle from before a fork shares position and locks.
    """

    def __init__(self, source: Hdf5Table, blocks: list[RowBlock]) -> None:
        self.source, self.blocks = source, blocks
        self.rows = -(-max(block.rows for block in blocks) // ROWS_ALIGNMENT) * ROWS_ALIGNMENT
        self.block_bytes = self.rows * source.row_bytes
        self._open: dict[str, Any] = {}
        self._pid = os.getpid()

    def read(self, indices: torch.Tensor, rows: torch.Tensor, epoch: int) -> list[Failure]:  # noqa: ARG002
        """Read block ``indices[i]`` into ``rows[i]``."""
        import numpy

        if self._pid != os.getpid():
            self._open, self._pid = {}, os.getpid()
        failures = []
        for number, row in zip(indices.tolist(), rows, strict=True):
            block = self.blocks[number]
            chosen = numpy.s_[block.row : block.row + block.rows]
            for column, out in zip(self.source.columns, self.parts(block, row), strict=True):
                try:
                    if block.file not in self._open:
                        self._open[block.file] = require_h5py().File(block.file, "r")
                    self._open[block.file][column.key].read_direct(out.numpy(), chosen)
                except (OSError, KeyError, ValueError) as error:
                    where = f"{block.file}, key {column.key}, rows {block.row} to {block.row + block.rows}"
                    failures.append(Failure(number, "corrupt", f"{where}: {error}", block.file))
                    break
        return failures

    def parts(self, block: RowBlock, row: torch.Tensor) -> list[torch.Tensor]:
        """The keys of a block as tensors over its bytes."""
        keys = torch.split(row, [self.rows * column.row_bytes for column in self.source.columns])
        return [
            part[: block.rows * column.row_bytes].view(column.dtype).view(block.rows, *column.shape)
            for column, part in zip(self.source.columns, keys, strict=True)
        ]
