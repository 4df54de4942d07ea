"""Labelled texts from CSV, JSON lines or Parquet, checked line by line."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fulltilt.errors import DataError, UsageError
from fulltilt.recipes import tables
from fulltilt.recipes.recipe import Request
from fulltilt.recipes.visobert import VisobertOptions

_TRAIN, _VALIDATION = ("train",), ("validation", "valid", "val", "dev", "test")
_SUFFIXES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")


@dataclass(frozen=True, slots=True)
class Split:
    """Texts and their class indices."""

    texts: list[str]
    labels: list[int]


@dataclass(frozen=True, slots=True)
class Texts:
    """Both splits, and the names of the classes by index."""

    train: Split
    validation: Split
    classes: tuple[str, ...]

    def balanced_weights(self) -> list[float]:
        """A weight per class so that all count the same, with a mean of 1 over the samples."""
        counts = Counter(self.train.labels)
        share = len(self.train.labels) / len(counts)
        return [share / counts[number] if counts[number] else 0.0 for number in range(len(self.classes))]


_Row = tuple[str, str, str]  # where it stands, text, label


def check(request: Request) -> None:
    """Check every line. Raises UsageError, DataError."""
    read_texts(request.data, request.options, request.settings.seed)


def read_texts(folder: Path, options: VisobertOptions, seed: int) -> Texts:
    """Read all texts. Raises UsageError for missing columns, DataError that names file and line otherwise."""
    found = _file(folder, _TRAIN)
    if found is None:
        raise DataError(f"{folder} has no train file", f"It is called train, and ends in {', '.join(_SUFFIXES)}.")
    train = list(_rows(found, options))
    if not train:
        raise DataError(f"{folder} has no training text", "Below the names of the columns each line is a text.")
    held = _file(folder, _VALIDATION) if folder.is_dir() else None
    if held is None:
        train, validation = _held_out(train, options.val_share, seed)
    elif not (validation := list(_rows(held, options))):
        raise DataError(f"{held} has no text", "Fill it, or remove it: then a part of the training texts is held out.")
    classes = _classes(train, options)
    numbers = {name: number for number, name in enumerate(classes)}
    return Texts(_split(train, numbers), _split(validation, numbers), classes)


def _file(folder: Path, names: tuple[str, ...]) -> Path | None:
    """The file of a split, if there is one."""
    if folder.is_file():
        return folder
    if not folder.is_dir():
        raise DataError(f"the data folder {folder} does not exist", "Give a folder with train.csv with --data.")
    there = {path.name.lower(): path for path in sorted(folder.iterdir()) if path.is_file()}
    for name in names:
        found = [path for suffix in _SUFFIXES if (path := there.get(f"{name}{suffix}")) is not None]
        if len(found) > 1:
            both = " and ".join(path.name for path in found)
            raise DataError(f"{folder} holds {both}, and only one of them can be meant", "Take the others out.")
        if found:
            return found[0]
    return None


def _held_out(rows: list[_Row], share: float, seed: int) -> tuple[list[_Row], list[_Row]]:
    """Random rows, but never the last text of a class."""
    order = random.Random(seed).sample(range(len(rows)), len(rows))
    left = Counter(label for _, _, label in rows)
    held: set[int] = set()
    for number in order:
        label = rows[number][2]
        if len(held) < max(1, round(share * len(rows))) and left[label] > 1:
            left[label] -= 1
            held.add(number)
    if not held:
        raise DataError("every label stands for one text alone, so that none can be held out to measure with")
    return [row for n, row in enumerate(rows) if n not in held], [row for n, row in enumerate(rows) if n in held]


def _classes(train: list[_Row], options: VisobertOptions) -> tuple[str, ...]:
    if options.classes is not None:
        return tuple(name.strip() for name in options.classes.split(","))
    found = {label for _, _, label in train}
    if len(found) < 2:
        raise DataError(f"every training text has the label {found.pop()!r}", "There is nothing to tell apart.")
    return tuple(sorted(found, key=_numbers_first))


def _numbers_first(label: str) -> tuple[int, int, str]:
    try:
        return 0, int(label), label
    except ValueError:
        return 1, 0, label


def _split(rows: list[_Row], numbers: dict[str, int]) -> Split:
    for where, _, label in rows:
        if label not in numbers:
            known = ", ".join(list(numbers)[:10])
            raise DataError(f"{where}: the label {label!r} is outside the classes ({known})", "Relabel or remove it.")
    return Split([text for _, text, _ in rows], [numbers[label] for _, _, label in rows])


# --------------------------------------------------------------------------- the formats


def _rows(path: Path, options: VisobertOptions) -> Iterator[_Row]:
    reader = {".jsonl": _json_lines, ".json": _json_lines, ".parquet": _parquet}.get(path.suffix.lower(), _csv)
    wanted = (options.text_column, options.label_column)
    try:
        for line, row in reader(path, wanted):
            where = f"{path}, line {line}"
            for name, what in zip(wanted, ("text", "label"), strict=True):
                if isinstance(row[name], list | dict):
                    raise DataError(f"{where}: {name} is {str(row[name])[:60]}, not one value")
                if _is_missing(row[name]) or (what == "label" and row[name] == "nan"):
                    raise DataError(f"{where}: there is no {what}", "Fill it in, or remove the line.")
            # JSON may hold half of a surrogate pair, which no tokenizer takes.
            text, label = (str(row[name]).encode(errors="replace").decode() for name in wanted)
            yield where, text, label.strip()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 (byte {error.start})", "Save it as UTF-8.") from error


def _is_missing(value: Any) -> bool:
    return value is None or not str(value).strip() or (isinstance(value, float) and math.isnan(value))


_Lines = Iterator[tuple[int, dict[str, Any]]]


def _csv(path: Path, wanted: tuple[str, str]) -> _Lines:
    columns, rows = tables.read(path, wanted)
    _need(path, wanted, columns)
    yield from rows


def _json_lines(path: Path, wanted: tuple[str, str]) -> _Lines:
    with path.open(encoding="utf-8-sig") as file:
        for line, content in enumerate(file, 1):
            if not content.strip():
                continue
            try:
                row = json.loads(content)
            except ValueError as error:
                raise DataError(f"{path}, line {line} is not JSON: {error}", "It has one object a line.") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {line} is not an object", 'Write {"text": …, "label": …}.')
            _need(path, wanted, row)
            yield line, row


def _parquet(path: Path, wanted: tuple[str, str]) -> _Lines:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise UsageError(f"reading {path} needs pyarrow", "Install it: pip install pyarrow, or save as CSV.") from error
    try:
        _need(path, wanted, parquet.read_schema(path).names)
        rows = parquet.read_table(path, columns=list(wanted)).to_pylist()
    except ArrowException as error:
        raise DataError(f"{path} is not Parquet: {str(error).splitlines()[0]}") from error
    yield from enumerate(rows, 1)


def _need(path: Path, wanted: tuple[str, str], found: Any) -> None:
    missing = [name for name in wanted if name not in found]
    if missing:
        has = ", ".join(map(str, list(found)[:10])) or "none"
        remedy = f"It has {has}; name them with text_column and label_column."
        raise UsageError(f"{path} has no column {' and '.join(missing)}", remedy)
