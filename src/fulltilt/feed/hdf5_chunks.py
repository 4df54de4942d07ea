"""Where the rows of an HDF5 data set lie in its file, so that threads read them past the library.

The HDF5 library serves one thread at a time and takes every chunk through its cache. The places of the chunks are no
secret: here they are looked up once, and any number of threads fetch them with ``pread``, plain ones straight into the
buffer that the GPU copies from. Read so are contiguous data and chunks that are plain, deflated (gzip) or shuffled.
Everything else (other filters, virtual or external data, chunks that were never written) is left to the library.
"""

from __future__ import annotations

import itertools
import os
import zlib
from dataclasses import dataclass
from typing import Any

_DEFLATE, _SHUFFLE = 1, 2
# The library before 1.12.3 finds the n-th chunk by walking past all before it.
_MOST_CHUNKS_BY_NUMBER = 4096


@dataclass(frozen=True)
class Contiguous:
    """Rows one after the other from ``offset`` on."""

    offset: int
    row_bytes: int
    dtype: Any

    def read(self, fd: int, first: int, out: Any) -> None:
        """Fill the array ``out`` with the rows from ``first`` on. Raises OSError."""
        if out.dtype == self.dtype:
            _fetch(fd, _bytes_of(out), self.offset + first * self.row_bytes)
        else:
            out[...] = (
                _fetched(fd, out.nbytes, self.offset + first * self.row_bytes).view(self.dtype).reshape(out.shape)
            )


@dataclass(frozen=True)
class Chunked:
    """A grid of chunks; ``offsets`` and ``sizes`` are arrays over the grid, ``filters`` in the order of writing."""

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: Any
    filters: tuple[int, ...]
    offsets: Any
    sizes: Any

    def read(self, fd: int, first: int, out: Any) -> None:
        """Fill the array ``out`` with the rows from ``first`` on. Raises OSError."""
        tall = self.chunk[0]
        # A plain chunk of whole rows needs no buffer of its own.
        straight = not self.filters and self.chunk[1:] == self.shape[1:] and out.dtype == self.dtype
        row_bytes = out.nbytes // len(out)
        for row in range(first // tall, -(-(first + len(out)) // tall)):
            low, high = max(first, row * tall), min(first + len(out), (row + 1) * tall)
            part = out[low - first : high - first]
            if straight:
                place = int(self.offsets[(row, *(0,) * (len(self.shape) - 1))])
                _fetch(fd, _bytes_of(part), place + (low - row * tall) * row_bytes)
                continue
            for others in itertools.product(*(range(count) for count in self.offsets.shape[1:])):
                decoded = self._chunk(fd, (row, *others))[low - row * tall : high - row * tall]
                starts = [number * side for number, side in zip(others, self.chunk[1:], strict=True)]
                # The last chunk of an axis reaches beyond the data.
                inside = [
                    slice(s, min(s + n, end)) for s, n, end in zip(starts, self.chunk[1:], self.shape[1:], strict=True)
                ]
                part[(slice(None), *inside)] = decoded[(slice(None), *(slice(s.stop - s.start) for s in inside))]

    def _chunk(self, fd: int, at: tuple[int, ...]) -> Any:
        import numpy

        raw: Any = _fetched(fd, int(self.sizes[at]), int(self.offsets[at]))
        for number in reversed(self.filters):
            if number == _DEFLATE:
                try:
                    raw = numpy.frombuffer(zlib.decompress(raw), dtype=numpy.uint8)
                except zlib.error as error:
                    raise OSError(f"a chunk cannot be decompressed ({error})") from error
            else:
                # Shuffled: the first bytes of all values, then the second ones, and so on.
                raw = numpy.ascontiguousarray(raw.reshape(self.dtype.itemsize, -1).T).reshape(-1)
        try:
            return raw.view(self.dtype).reshape(self.chunk)
        except ValueError as error:
            raise OSError(f"a chunk has {raw.nbytes} bytes, which is not its size") from error


def locate(data: Any) -> Contiguous | Chunked | None:
    """Where the rows of an h5py data set lie; None where they have to be read through the library."""
    if data.is_virtual or data.external or data.file.driver != "sec2" or data.file.userblock_size:
        return None
    if data.chunks is None:
        offset = data.id.get_offset()
        rows = max(1, data.shape[0])
        return None if offset is None else Contiguous(offset, data.nbytes // rows, data.dtype)
    properties = data.id.get_create_plist()
    filters = tuple(properties.get_filter(number)[0] for number in range(properties.get_nfilters()))
    if not set(filters) <= {_DEFLATE, _SHUFFLE}:
        return None
    return _grid(data, filters)


def _grid(data: Any, filters: tuple[int, ...]) -> Chunked | None:
    import numpy

    sides = [-(-size // side) for size, side in zip(data.shape, data.chunks, strict=True)]
    offsets, sizes = numpy.full(sides, -1, dtype=numpy.int64), numpy.zeros(sides, dtype=numpy.int64)
    if hasattr(data.id, "chunk_iter"):
        found: list[Any] = []
        data.id.chunk_iter(found.append)
    elif data.id.get_num_chunks() <= _MOST_CHUNKS_BY_NUMBER:
        found = [data.id.get_chunk_info(number) for number in range(data.id.get_num_chunks())]
    else:
        return None
    for info in found:
        if info.filter_mask or info.byte_offset is None:
            return None  # a chunk that was written without its filters
        at = tuple(start // side for start, side in zip(info.chunk_offset, data.chunks, strict=True))
        if any(number >= count for number, count in zip(at, sides, strict=True)):
            continue  # left over from before the data set was made smaller
        offsets[at], sizes[at] = info.byte_offset, info.size
    if bool((offsets < 0).any()):
        return None  # never written: the library knows what to put there
    return Chunked(data.shape, data.chunks, data.dtype, filters, offsets, sizes)


def _fetched(fd: int, size: int, offset: int) -> Any:
    import numpy

    raw: Any = numpy.empty(size, dtype=numpy.uint8)
    _fetch(fd, memoryview(raw), offset)
    return raw


def _bytes_of(array: Any) -> memoryview:
    import numpy

    flat: Any = array.reshape(-1).view(numpy.uint8)
    return memoryview(flat)


def _fetch(fd: int, into: memoryview, offset: int) -> None:
    while len(into):
        read = os.preadv(fd, [into], offset)
        if not read:
            raise OSError(f"the file ends at byte {offset}, within the data")
        into, offset = into[read:], offset + read
