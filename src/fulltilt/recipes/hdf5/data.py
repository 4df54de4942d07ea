"""The HDF5 files of a folder as training and validation data, checked before training."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from fulltilt.errors import DataError
from fulltilt.feed.hdf5_files import Hdf5Table, describe, require_h5py
from fulltilt.recipes.hdf5 import Hdf5Options

_SUFFIXES = {".h5", ".hdf5", ".hdf", ".he5"}
_HELD_OUT = re.compile(r"(val|valid|validation|test)([-_. \d].*)?", re.IGNORECASE)
# Labels read at a time.
_PIECE = 1_000_000


@dataclass(frozen=True, slots=True)
class FileShare:
    """Files, and the share of each file's rows that is used."""

    files: tuple[Path, ...]
    rows: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Hdf5Data:
    """The contents of a folder: training and validation files, the number of features, and the training labels."""

    train: FileShare
    validation: FileShare
    feature_count: int
    positives: int
    negatives: int

    @property
    def pos_weight(self) -> float:
        """Negatives per positive."""
        return self.negatives / self.positives


def keys_of(options: Hdf5Options) -> list[str]:
    """All keys of a sample, the label's last."""
    return [*(key.strip() for key in options.features.split(",")), options.labels]


def read_folder(folder: Path, options: Hdf5Options) -> Hdf5Data:
    """Find the files, check keys, shapes and every label. Raises UsageError and DataError that name file and row."""
    train, validation = split(hdf5_files(folder), folder, options.val_share)
    keys = keys_of(options)
    sources = [describe(part.files, keys, options.window, options.stride, part.rows) for part in (train, validation)]
    features, _ = (_feature_count(source, keys[:-1], options) for source in sources)
    _refuse_other_windows(*sources)
    (negatives, positives), _ = (_count_labels(source) for source in sources)
    if not negatives or not positives:
        missing = "1" if negatives else "0"
        raise DataError(f"no training label in {folder} is {missing}", f"Look at {options.labels!r} in the files.")
    return Hdf5Data(train, validation, features, positives, negatives)


def hdf5_files(folder: Path) -> list[Path]:
    """The HDF5 files below a folder, sorted, or a single file. Raises DataError for none."""
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise DataError(f"the data folder {folder} does not exist", "Give a folder of .h5 files with --data.")
    found = (path for path in folder.rglob("*") if path.suffix.lower() in _SUFFIXES and not path.is_dir())
    files = sorted(path for path in found if path.name[0] != ".")  # those are a system's own
    if odd := next((path for path in files if path.exists() and not path.is_file()), None):
        raise DataError(f"{odd} is not a regular file", "Take it out of the folder.")
    if not files:
        raise DataError(f"{folder} holds no HDF5 file", f"Their names end in {', '.join(sorted(_SUFFIXES))}.")
    return files


def split(files: list[Path], folder: Path, val_share: float) -> tuple[FileShare, FileShare]:
    """Training and validation: files or folders called val… or test… are held out, else the last rows of each file.

    Not random rows: neighbouring windows are nearly the same, and validation would see training data.
    """
    held = [path for path in files if any(_HELD_OUT.fullmatch(name) for name in _names(path, folder))]
    rest = [path for path in files if path not in held]
    if held and rest:
        return FileShare(tuple(rest)), FileShare(tuple(held))
    cut = 1 - val_share
    return FileShare(tuple(files), (0.0, cut)), FileShare(tuple(files), (cut, 1.0))


def _names(path: Path, folder: Path) -> tuple[str, ...]:
    inside = path.relative_to(folder) if path != folder else Path(path.name)
    return (*inside.parts[:-1], inside.stem)


def _feature_count(source: Hdf5Table, keys: list[str], options: Hdf5Options) -> int:
    """Features of one time step over all keys. Raises DataError for arrays that are not windows."""
    file = source.files[0]
    label = source.columns[-1]
    if label.shape not in ((), (1,)):
        what = f"{file}: {label.key!r} has rows of shape {label.shape}, not one label a row"
        raise DataError(what, "Store one label per row under a key of its own, and name it with labels.")
    wanted = 1 if options.window else 2
    for column in source.columns[:-1]:
        if column.dtype.is_complex:
            raise DataError(f"{file}: {column.key!r} holds complex numbers", "Store their magnitude, or both parts.")
        if len(column.shape) != wanted:
            meant = "[rows, features]" if options.window else "[windows, time, features]"
            found = f"[rows{''.join(f', {size}' for size in column.shape)}]"
            remedy = None if options.window else "For long recordings of [rows, features] set window."
            raise DataError(f"{file}: {column.key!r} is {found}, not {meant}", remedy)
    if len({column.shape[:-1] for column in source.columns[:-1]}) > 1:
        raise DataError(f"{file}: {', '.join(keys)} differ in their number of time steps")
    return sum(column.shape[-1] for column in source.columns[:-1])


def _refuse_other_windows(train: Hdf5Table, validation: Hdf5Table) -> None:
    for column, other in zip(train.columns[:-1], validation.columns[:-1], strict=True):
        if column.shape != other.shape:
            held, own = (f"[{', '.join(map(str, found.shape))}]" for found in (other, column))
            raise DataError(
                f"{validation.files[0]}: {column.key!r} has rows of {held}, but {own} in {train.files[0]}",
                "Training and validation need windows of one shape.",
            )


def _count_labels(source: Hdf5Table) -> tuple[int, int]:
    """How many labels are 0 and 1. Raises DataError that names the first that is neither."""
    h5py = require_h5py()
    key = source.columns[-1].key
    ones = 0
    for path, first, rows in zip(source.files, source.first, source.rows, strict=True):
        with h5py.File(path, "r") as file:
            for start in range(first, first + rows, _PIECE):
                labels = file[key][start : min(start + _PIECE, first + rows)].reshape(-1)
                is_one = labels == 1
                if (wrong := (~is_one & (labels != 0)).nonzero()[0]).size:
                    what = f"{path}: {key}[{start + int(wrong[0])}] is {labels[wrong[0]]}"
                    raise DataError(f"{what}, outside the classes 0 and 1", "Relabel or remove it.")
                ones += int(is_one.sum())
    return sum(source.rows) - ones, ones
