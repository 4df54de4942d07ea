"""HDF5 files as rows, read in large blocks along the chunks.

A data set read with ``h5[i]`` decompresses a whole chunk for one sample; a block reads each chunk once: by threads past
the library where that is possible (``hdf5_chunks.py``), else in worker processes that open the files themselves. A
handle inherited across a fork shares its file position and locks with the parent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fulltilt.errors import DataError, UsageError
from fulltilt.feed.hdf5_elsewhere import broken_link, refuse_missing

# A block is large enough to amortise a read call and a copy, and small enough that several fit beside a batch.
BLOCK_BYTES = 8 * 1024**2
DAMAGED = "The file is cut or damaged: copy it anew."


def require_h5py() -> Any:
    """The module h5py. Raises UsageError that says what to install."""
    try:
        import h5py
    except ImportError as error:
        raise UsageError("reading HDF5 needs h5py", "Install it with: pip install 'fulltilt[hdf5]'") from error
    return h5py


@dataclass(frozen=True)
class Column:
    """One key of the files: what a row of it is."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    row_bytes: int
    chunk_rows: int


@dataclass(frozen=True)
class Block:
    """Consecutive rows of one file, and the samples that begin in them."""

    file: str
    row: int
    rows: int
    global_row: int
    first_sample: int
    samples: int


@dataclass(frozen=True)
class Source:
    """Files and keys as one long table. Sample s is ``window`` rows from row ``s × stride`` on, within one file.

    ``rows`` counts the rows of each file that are used, from row ``first`` of it on.
    """

    files: tuple[str, ...]
    rows: tuple[int, ...]
    columns: tuple[Column, ...]
    window: int | None
    stride: int
    first: tuple[int, ...]

    @property
    def total_rows(self) -> int:
        """Rows of all files together."""
        return sum(self.rows)

    @property
    def samples(self) -> int:
        """Samples of all files together; no window crosses from one file into the next."""
        return sum(self.samples_of(count) for count in self.rows)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over all keys."""
        return sum(column.row_bytes for column in self.columns)

    def samples_of(self, rows: int) -> int:
        """Samples that a file of ``rows`` rows holds."""
        length = self.window or 1
        return max(0, (rows - length) // self.stride + 1) if rows >= length else 0

    def first_rows(self) -> torch.Tensor:
        """The row, counted over all files, at which each sample begins."""
        starts, before = [], 0
        for count in self.rows:
            starts.append(before + torch.arange(self.samples_of(count)) * self.stride)
            before += count
        return torch.cat(starts)

    def blocks(self, block_bytes: int = BLOCK_BYTES) -> list[Block]:
        """All samples in blocks that begin at chunk boundaries. A block holds every row of its samples."""
        chunk = max(column.chunk_rows for column in self.columns)
        rows_wanted = max(1, block_bytes // self.row_bytes)
        aligned = max(chunk, rows_wanted // chunk * chunk)
        per_block = max(1, aligned // self.stride)
        overlap = (self.window or 1) - 1
        found, before_rows, before_samples = [], 0, 0
        for file, start, count in zip(self.files, self.first, self.rows, strict=True):
            samples = self.samples_of(count)
            for first in range(0, samples, per_block):
                here = min(per_block, samples - first)
                row = first * self.stride
                rows = (here - 1) * self.stride + 1 + overlap
                found.append(Block(file, start + row, rows, before_rows + row, before_samples + first, here))
            before_rows += count
            before_samples += samples
        return found


def describe(
    files: Sequence[str | Path] | str | Path,
    keys: Sequence[str],
    window: int | None,
    stride: int,
    part: tuple[float, float] = (0.0, 1.0),
) -> Source:
    """Look at the files without reading rows; ``part`` is the share of each file's rows to use, from and to.

    Raises UsageError for wrong names, DataError for damage.
    """
    h5py = require_h5py()
    names = [files] if isinstance(files, str | Path) else list(files)
    if not names or not keys:
        raise UsageError("no HDF5 file or no key was given")
    if stride < 1 or (window is not None and window < 1):
        raise UsageError(f"window {window} and stride {stride} must be at least 1")
    if not 0 <= part[0] < part[1] <= 1:
        raise UsageError(f"part {part} is not a range within 0 to 1")
    rows: list[int] = []
    columns: tuple[Column, ...] | None = None
    for name in names:
        if not Path(name).exists():
            raise UsageError(f"the HDF5 file {name} does not exist")
        try:
            with h5py.File(name, "r") as file:
                here = tuple(_column(file, str(name), key) for key in keys)
                lengths = {key: file[key].shape[0] for key in keys}
        except BlockingIOError as error:
            raise DataError(f"{name} is locked: {error}", "Close it where it is being written.") from error
        except (OSError, KeyError) as error:
            raise DataError(f"{name} cannot be read as HDF5: {error}", DAMAGED) from error
        if len(set(lengths.values())) > 1:
            raise DataError(f"{name}: its keys differ in length: {lengths}", "Each row needs a value under every key.")
        if columns is not None and [(c.shape, c.dtype) for c in here] != [(c.shape, c.dtype) for c in columns]:
            raise _other_rows(str(name), here, str(names[0]), columns)
        columns = columns or here
        rows.append(next(iter(lengths.values())))
    assert columns is not None
    first, last = ([round(share * count) for count in rows] for share in part)
    used = tuple(end - start for start, end in zip(first, last, strict=True))
    source = Source(tuple(str(name) for name in names), used, columns, window, stride, tuple(first))
    if source.samples == 0:
        length = "" if window is None else f" for windows of {window}"
        raise DataError(
            f"{', '.join(source.files[:3])}: no sample in {source.total_rows} of {sum(rows)} rows{length}",
            "More rows are needed, a shorter window, or another share of the files.",
        )
    return source


def _column(file: Any, name: str, key: str) -> Column:
    if key not in file:
        raise UsageError(f"{name} has no key {key!r}", f"It has: {', '.join(sorted(file)) or 'none'}.")
    try:
        data = file[key]
    except KeyError as error:
        raise broken_link(file, name, key) or error from None
    if hasattr(data, "keys"):
        inside = ", ".join(f"{key}/{inner}" for inner in sorted(data)) or "nothing"
        raise UsageError(f"{name}: {key!r} is not an array of rows, but a group", f"It holds: {inside}.")
    if not getattr(data, "shape", None):  # a single value, a type, or nothing at all
        raise UsageError(f"{name}: {key!r} is not an array of rows, but a single value", "Give another key.")
    refuse_missing(data, name, key)
    import numpy

    try:
        # Whatever the byte order of the file, rows are read in that of the machine.
        dtype = torch.from_numpy(numpy.empty(0, dtype=data.dtype.newbyteorder("="))).dtype
    except TypeError as error:
        kind, remedy = _no_numbers(data.dtype)
        raise DataError(f"{name}: {key!r} holds {kind}, not numbers of one kind", remedy) from error
    shape = tuple(int(size) for size in data.shape[1:])
    row_bytes = int(data.dtype.itemsize)
    for size in shape:
        row_bytes *= size
    if row_bytes == 0:
        whole = " × ".join(str(size) for size in data.shape)
        raise DataError(f"{name}: {key!r} holds no value in its rows: its shape is {whole}", "Give another key.")
    return Column(key, shape, dtype, row_bytes, int(data.chunks[0]) if data.chunks else 1)


def _no_numbers(dtype: Any) -> tuple[str, str]:
    """What an array that torch cannot have holds, and what to do about it."""
    import h5py

    if h5py.check_string_dtype(dtype) is not None:
        return "strings", "Store numbers in their place, such as 0 and 1 for two labels, or give another key."
    if h5py.check_vlen_dtype(dtype) is not None:
        return "rows of differing length", "Pad them to one length, or give another key."
    if dtype.names:
        named = f"records of {', '.join(dtype.names)}"
        return named, "Store each of these as an array of its own, or give another key."
    return str(dtype), "Store it as integers or floating-point numbers, or give another key."


def _other_rows(name: str, here: tuple[Column, ...], first: str, columns: tuple[Column, ...]) -> DataError:
    key, own, other = next(
        (mine.key, _row(mine), _row(theirs))
        for mine, theirs in zip(here, columns, strict=True)
        if _row(mine) != _row(theirs)
    )
    what = f"{name}: rows of {key!r} are {own}, but {other} in {first}"
    return DataError(what, "Store them alike in every file, or leave that file out.")


def _row(column: Column) -> str:
    kind = str(column.dtype).removeprefix("torch.")
    return f"{kind}[{', '.join(map(str, column.shape))}]" if column.shape else kind
