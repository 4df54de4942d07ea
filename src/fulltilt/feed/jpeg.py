"""JPEG files as a data set: decoded once by workers where the pictures fit in memory, on the GPU where that is faster.

Decoding on the GPU pays above memory, where every picture is decoded in every epoch: the workers then read bytes only,
and nvJPEG decodes whole batches beside the training. Which way is faster is measured on the user's own files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from fulltilt.errors import DataError, UsageError
from fulltilt.feed.epoch_order import spread
from fulltilt.feed.loader import to_device
from fulltilt.feed.sample_store import device_or_default
from fulltilt.feed.tiers import default_workers, measure_room

Decoder = Literal["cpu", "gpu"]
# Decoding there takes a part of the GPU's own time from the training: it has to be clearly faster.
GPU_MARGIN = 1.2
# Files that are decoded to find out: enough for one batch of the GPU.
MEASURED_FILES = 64


@dataclass(frozen=True)
class DecoderChoice:
    """The decoder chosen, and in words why."""

    decoder: Decoder
    reason: str


def choose_decoder(cpu_per_s: float, gpu_per_s: float | None) -> DecoderChoice:
    """Where to decode, by pictures per second of all workers together, and of the GPU; None where it cannot."""
    if gpu_per_s is None:
        return DecoderChoice("cpu", "there is no GPU that decodes JPEG")
    measured = f"the GPU decodes {gpu_per_s:,.0f} pictures/s, the workers {cpu_per_s:,.0f}"
    return DecoderChoice("gpu" if gpu_per_s > GPU_MARGIN * cpu_per_s else "cpu", measured)


def jpeg(
    files: Sequence[str | Path],
    size: tuple[int, int],
    others: Any = None,
    *,
    decoder: Literal["auto", "cpu", "gpu"] = "auto",
    device: torch.device | str | None = None,
    workers: int | None = None,
) -> JpegFiles:
    """A data set for ``feed.loader``: pictures as uint8 [3, height, width], with ``others[i]`` where that is given.

    ``auto`` measures which decoder is faster, unless the decoded pictures fit in memory. Raises UsageError, DataError.
    """
    if not files:
        raise UsageError("no JPEG file was given")
    if isinstance(files, str | bytes):
        raise UsageError(f"files is {files!r}; it has to be a list of files")
    if not isinstance(size, tuple | list) or len(size) != 2 or not all(type(s) is int and s > 0 for s in size):
        raise UsageError(f"size is {size!r}; it has to be (height, width)")
    if others is not None and len(others) != len(files):
        raise UsageError(f"there are {len(files)} files and {len(others)} others")
    where = device_or_default(device)
    choice = DecoderChoice("cpu" if decoder == "auto" else decoder, "asked for")
    if decoder == "gpu" and where.type != "cuda":
        raise UsageError("there is no GPU to decode on", "Use decoder='auto'.")
    if decoder == "auto":
        room = measure_room(where, None)
        need = len(files) * 3 * size[0] * size[1]
        if any(need <= free for free in (room.vram_bytes or 0, room.pinned_bytes or 0, room.ram_bytes)):
            choice = DecoderChoice("cpu", "the decoded pictures fit in memory: each is decoded once")
        else:
            picked = [Path(files[number]) for number in spread(len(files), MEASURED_FILES)]
            choice = choose_decoder(*measure_decoders(picked, size, where, workers or default_workers()))
    return JpegFiles([os.fspath(file) for file in files], size, others, choice)


class JpegFiles(torch.utils.data.Dataset[Any]):
    """What ``feed.jpeg`` returns. For the GPU a sample is the file's bytes, which ``finish_on_device`` decodes."""

    def __init__(self, files: list[str], size: tuple[int, int], others: Any, choice: DecoderChoice) -> None:
        self.files, self.size, self.others, self.choice = files, size, others, choice
        self._longest = max(_length(file) for file in files) if choice.decoder == "gpu" else 0

    @property
    def finishes_on_device(self) -> bool:
        """Whether the loader has to hand batches to ``finish_on_device``."""
        return self.choice.decoder == "gpu"

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        encoded = _bytes(self.files[index])
        if self.choice.decoder == "cpu":
            picture = decode_here(encoded, self.size, self.files[index])
            return picture if self.others is None else (picture, self.others[index])
        row = torch.zeros(self._longest, dtype=torch.uint8)
        row[: len(encoded)] = encoded
        sample = (row, len(encoded), index)
        return sample if self.others is None else (*sample, self.others[index])

    def finish_on_device(self, batch: Any, device: torch.device) -> Any:
        """The batch with its pictures decoded on ``device``; a file that the GPU cannot read is tried on the CPU."""
        rows, lengths, indices, *rest = batch
        encoded = [row[:length] for row, length in zip(rows, lengths.tolist(), strict=True)]
        try:
            pictures = decode_on(encoded, self.size, device)
        except RuntimeError:
            names = [self.files[index] for index in indices.tolist()]
            here = [decode_here(part, self.size, name) for part, name in zip(encoded, names, strict=True)]
            pictures = torch.stack(here).to(device)
        return pictures if self.others is None else (pictures, to_device(rest[0], device))


# --------------------------------------------------------------------------- decoding


def decode_here(encoded: torch.Tensor, size: tuple[int, int], name: str) -> torch.Tensor:
    """One picture, decoded and scaled on the CPU. Raises DataError that names the file."""
    io, resize = _torchvision()
    try:
        return resize(io.decode_jpeg(encoded, mode=io.ImageReadMode.RGB), list(size), antialias=True)  # type: ignore[no-any-return]
    except RuntimeError as error:
        raise DataError(f"{name} cannot be read as JPEG: {' '.join(str(error).split())[:200]}") from error


def decode_on(encoded: list[torch.Tensor], size: tuple[int, int], device: torch.device) -> torch.Tensor:
    """A batch [n, 3, height, width] decoded and scaled on ``device``. Raises RuntimeError."""
    io, resize = _torchvision()
    pictures = io.decode_jpeg(encoded, mode=io.ImageReadMode.RGB, device=device)
    return torch.stack([resize(picture, list(size), antialias=True) for picture in pictures])


def measure_decoders(
    files: list[Path],
    size: tuple[int, int],
    device: torch.device,
    workers: int,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float | None]:
    """Pictures per second of ``workers`` workers, for each of which one CPU thread stands, and of the GPU or None."""
    encoded = [_bytes(file) for file in files]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        began = clock()
        for part, file in zip(encoded, files, strict=True):
            decode_here(part, size, os.fspath(file))
        cpu = workers * len(files) / (clock() - began)
    finally:
        torch.set_num_threads(threads)
    if device.type != "cuda":
        return cpu, None
    try:
        for _ in range(2):  # the first time the decoder is made
            torch.cuda.synchronize(device)
            began = clock()
            decode_on(encoded, size, device)
            torch.cuda.synchronize(device)
        return cpu, len(files) / (clock() - began)
    except RuntimeError:
        return cpu, None  # torchvision without nvJPEG, or files that it does not read


def _torchvision() -> tuple[Any, Callable[..., Any]]:
    try:
        from torchvision import io
        from torchvision.transforms.v2.functional import resize
    except ImportError as error:
        raise UsageError("decoding JPEG needs torchvision", "Install it with: pip install torchvision") from error
    return io, resize


def _bytes(file: str | Path) -> torch.Tensor:
    try:
        return torch.frombuffer(bytearray(Path(file).read_bytes()), dtype=torch.uint8)
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}") from error


def _length(file: str) -> int:
    try:
        return Path(file).stat().st_size
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from error
