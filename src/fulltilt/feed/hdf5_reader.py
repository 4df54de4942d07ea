"""Reading blocks of HDF5 files: past the library where that is possible, else through handles of this process's own."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any

import torch

from fulltilt.feed.hdf5_blocks import Block, Column, Source, require_h5py
from fulltilt.feed.hdf5_chunks import Chunked, Contiguous, locate
from fulltilt.feed.readers import Failure


class BlockReader:
    """Reads blocks by number, for a pool: the keys of a block lie one after the other in its bytes."""

    def __init__(self, source: Source, blocks: list[Block]) -> None:
        self.source = source
        self.blocks = blocks
        self.places = {
            (file, column.key): _located(file, column.key) for file in source.files for column in source.columns
        }
        self._most = max(block.rows for block in blocks)
        self._open: dict[str, Any] = {}
        self._raw = OpenFiles()
        self._pid = os.getpid()

    @property
    def past_library(self) -> bool:
        """Whether the library is needed for none of the keys: then any number of threads may read at once."""
        return None not in self.places.values()

    @property
    def block_bytes(self) -> int:
        """Bytes of the largest block."""
        return sum(_aligned(self._most * column.row_bytes) for column in self.source.columns)

    def opened_in_worker(self) -> None:
        """Called once in a worker process before its first read."""
        self._forget_inherited()

    def read(self, indices: torch.Tensor, rows: torch.Tensor, epoch: int) -> list[Failure]:  # noqa: ARG002
        """Read block ``indices[i]`` into ``rows[i]``."""
        self._forget_inherited()
        failures = []
        for position, number in enumerate(indices.tolist()):
            block = self.blocks[number]
            for column, part in self.parts(block, rows[position]):
                try:
                    self._read_rows(block, column, part.numpy())
                except (OSError, KeyError, ValueError) as error:
                    where = f"{block.file}, key {column.key}, rows {block.row} to {block.row + block.rows}"
                    failures.append(Failure(number, "corrupt", f"{where}: {error}", block.file))
                    break
        return failures

    def parts(self, block: Block, row: torch.Tensor) -> list[tuple[Column, torch.Tensor]]:
        """The keys of a block as tensors over its bytes."""
        offset, found = 0, []
        for column in self.source.columns:
            part = row[offset : offset + block.rows * column.row_bytes]
            found.append((column, part.view(column.dtype).view(block.rows, *column.shape)))
            offset += _aligned(self._most * column.row_bytes)
        return found

    def _read_rows(self, block: Block, column: Column, out: Any) -> None:
        place = self.places[block.file, column.key]
        if place is not None:
            place.read(self._raw.descriptor(block.file), block.row, out)
            return
        import numpy

        if block.file not in self._open:
            self._open[block.file] = require_h5py().File(block.file, "r")
        self._open[block.file][column.key].read_direct(out, numpy.s_[block.row : block.row + block.rows])

    def _forget_inherited(self) -> None:
        if self._pid != os.getpid():
            self._open, self._pid = {}, os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_open": {}, "_pid": -1}


class OpenFiles:
    """Descriptors of files, opened when first asked for and closed together; ``pread`` has no position to share."""

    def __init__(self) -> None:
        self._descriptors: dict[str, int] = {}
        self._opening = threading.Lock()

    def descriptor(self, name: str) -> int:
        """The descriptor of a file, for reading. Raises OSError."""
        with self._opening:
            if name not in self._descriptors:
                self._descriptors[name] = os.open(name, os.O_RDONLY)
            return self._descriptors[name]

    def __reduce__(self) -> tuple[type[OpenFiles], tuple[()]]:
        return OpenFiles, ()  # another process opens its own

    def __del__(self) -> None:
        for descriptor in self._descriptors.values():
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _located(file: str, key: str) -> Contiguous | Chunked | None:
    with require_h5py().File(file, "r") as opened:
        data = opened[key]
        if data.file.filename != opened.filename:
            return None  # a link to another file
        place = locate(data)
        return place if place is None or _agrees(place, file, data) else None


def _agrees(place: Contiguous | Chunked, file: str, data: Any) -> bool:
    """Whether the first and the last row are those that the library reads."""
    import numpy

    descriptor = os.open(file, os.O_RDONLY)
    try:
        for row in (0, len(data) - 1):
            found = numpy.empty((1, *data.shape[1:]), dtype=data.dtype.newbyteorder("="))
            place.read(descriptor, row, found)
            if found.tobytes() != data[row : row + 1].astype(found.dtype).tobytes():
                return False
    except OSError:
        pass  # damaged: whoever reads the rows says where
    finally:
        os.close(descriptor)
    return True


def _aligned(count: int) -> int:
    return -(-count // 16) * 16
