"""Feature windows as a sensor gives them: four recordings in HDF5, a weak event in some windows.

    train-0.h5, train-1.h5, train-2.h5, val-0.h5
        features  [windows, 64 steps, 16 channels] float32
        labels    [windows] uint8, one window in six is an event

An event is a short rising chirp, hardly louder than the noise, on a few neighbouring channels. Half of the other
windows hold a decoy of the same energy that falls instead of rising, so that loudness alone tells nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fulltilt.feed.hdf5_files import require_h5py

STEPS, CHANNELS = 64, 16
EVENT_SHARE, DECOY_SHARE = 1 / 6, 0.5
VALIDATION_SHARE = 0.2
TRAINING_FILES = 3
CHUNK = 256
# Windows made at a time: a few megabytes of noise.
_PIECE = 2048

Floats = NDArray[np.float32]


def make(folder: Path, size: int, seed: int) -> Iterator[int]:
    """Write the recordings; yields once for each window."""
    for number, (name, count) in enumerate(recordings(size).items()):
        rng = np.random.default_rng([seed, number])
        with _written(folder / name) as file:
            chunk = max(min(CHUNK, count), 1)
            features = file.create_dataset("features", (count, STEPS, CHANNELS), "f4", chunks=(chunk, STEPS, CHANNELS))
            labels = file.create_dataset("labels", (count,), "u1")
            for start in range(0, count, _PIECE):
                stop = min(start + _PIECE, count)
                features[start:stop], labels[start:stop] = windows(rng, stop - start)
                yield from range(start, stop)


@contextlib.contextmanager
def _written(path: Path) -> Iterator[Any]:
    """A new HDF5 file. Raises OSError for a disk that refuses, as a plain file would."""
    h5py = require_h5py()
    try:
        # Without a cache nothing waits to be written: the library crashes at exit when it cannot write it then.
        with h5py.File(path, "w", rdcc_nbytes=0) as file:
            yield file
    except (OSError, RuntimeError) as error:  # h5py raises the latter when it cannot close
        number = re.search(r"errno = (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def recordings(size: int) -> dict[str, int]:
    """File name to number of windows; together ``size``."""
    validation = round(size * VALIDATION_SHARE)
    ends = [(size - validation) * n // TRAINING_FILES for n in range(TRAINING_FILES + 1)]
    counts = {f"train-{n}.h5": ends[n + 1] - ends[n] for n in range(TRAINING_FILES)}
    return {name: count for name, count in {**counts, "val-0.h5": validation}.items() if count}


def windows(rng: np.random.Generator, count: int) -> tuple[Floats, NDArray[np.uint8]]:
    """``count`` windows, and which of them are events."""
    noise = rng.standard_normal((count, STEPS, CHANNELS), dtype=np.float32)
    # Neighbouring channels and steps hear the same noise, as sensors do.
    noise[:, 1:] += 0.5 * noise[:, :-1]
    noise[:, :, 1:] += 0.5 * noise[:, :, :-1]
    truth = rng.random(count) < EVENT_SHARE
    decoy = ~truth & (rng.random(count) < DECOY_SHARE)
    amplitude = np.where(truth | decoy, rng.uniform(1.1, 2.4, count), 0.0)
    chirp = _chirps(rng, count, rising=truth) * amplitude[:, None]
    made = noise + chirp[:, :, None].astype(np.float32) * _channels(rng, count)[:, None, :]
    return made.astype(np.float32), truth.astype(np.uint8)


def _chirps(rng: np.random.Generator, count: int, rising: NDArray[np.bool_]) -> NDArray[np.float64]:
    """[count, STEPS]: a burst of about twenty steps whose pitch rises or falls."""
    centre = rng.uniform(14, STEPS - 14, count)[:, None]
    phase = rng.uniform(0, 2 * np.pi, count)[:, None]
    time = np.arange(STEPS)[None, :] - centre
    slope = np.where(rising, 1.0, -1.0)[:, None] * 0.012
    pitch = 0.16 + slope * time / 2
    inside = np.exp(-0.5 * (time / 7.0) ** 2)
    return np.asarray(inside * np.sin(2 * np.pi * pitch * time + phase) * 1.8)


def _channels(rng: np.random.Generator, count: int) -> Floats:
    """[count, CHANNELS]: how loud each channel hears the burst; about four of them do."""
    place = rng.uniform(2, CHANNELS - 2, count)[:, None]
    near = np.exp(-0.5 * ((np.arange(CHANNELS)[None, :] - place) / 2.0) ** 2)
    return near.astype(np.float32)
