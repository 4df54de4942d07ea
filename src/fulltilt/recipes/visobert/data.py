"""Labelled texts from CSV, JSON lines or Parquet, checked line by line, and their tokens in batches of like length.

A DataLoader asks a sampler for the numbers of a batch and its data set for that batch; here the data set cuts it out of
tokens that lie on the device. So the Trainer's own bookkeeping (skipping on resume, counting) works as it is.
"""

from __future__ import annotations

import csv
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from fulltilt import feed
from fulltilt.errors import DataError, UsageError
from fulltilt.feed.text import Batching, TextLoader, Tokens, padded_length
from fulltilt.recipes import tables
from fulltilt.recipes.recipe import Request
from fulltilt.recipes.visobert import Options

_TRAIN, _VALIDATION = ("train",), ("validation", "valid", "val", "dev", "test")
_HALF = re.compile("[\ud800-\udfff]")  # JSON may hold halves of surrogate pairs, which no tokenizer takes
_SUFFIXES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")


@dataclass(frozen=True, slots=True)
class Split:
    """Texts and the numbers of their classes."""

    texts: list[str]
    labels: list[int]


@dataclass(frozen=True, slots=True)
class Texts:
    """Both splits and the names of the classes, by number."""

    train: Split
    validation: Split
    classes: tuple[str, ...]

    def balanced_weights(self) -> list[float]:
        """A weight for each class so that all of them count alike, 1 on average over the samples."""
        counts = Counter(self.train.labels)
        share = len(self.train.labels) / len(counts)
        return [share / counts[number] if counts[number] else 0.0 for number in range(len(self.classes))]


_Row = tuple[str, str, str]  # where it stands, text, label


def check(request: Request) -> None:
    """Look at every line. Raises UsageError, DataError."""
    read_texts(request.data, request.options, request.settings.seed)


def read_texts(folder: Path, options: Options, seed: int) -> Texts:
    """Read all texts. Raises UsageError for missing files and columns, DataError that names the line otherwise."""
    train = list(_rows(_file(folder, _TRAIN), options))
    held = _file(folder, _VALIDATION) if folder.is_dir() else None
    validation = list(_rows(held, options)) if held is not None else []
    if not train:
        raise DataError(f"{folder} has no training text", "Below the names of the columns each line is a text.")
    if held is not None and not validation:
        raise DataError(f"{held} has no text", "Fill it, or remove it: then a part of the training texts is held out.")
    if not validation:
        train, validation = _held_out(train, options.val_share, seed)
    classes = _classes(train, options)
    numbers = {name: number for number, name in enumerate(classes)}
    return Texts(_split(train, numbers), _split(validation, numbers), classes)


def _file(folder: Path, names: tuple[str, ...]) -> Path | None:
    """The file of a split; None where there need not be one."""
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
    if names == _TRAIN:
        raise DataError(f"{folder} has no train file", f"It is called train, and ends in {', '.join(_SUFFIXES)}.")
    return None


def _held_out(rows: list[_Row], share: float, seed: int) -> tuple[list[_Row], list[_Row]]:
    if len(rows) < 2:
        raise DataError("one text is too few to train on and to measure with")
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    cut = max(1, round(share * len(rows)))
    held: list[int] = []
    left = Counter(label for _, _, label in rows)
    for number in order:
        label = rows[number][2]
        if len(held) < cut and left[label] > 1:  # the last text of a class is needed to learn it
            left[label] -= 1
            held.append(number)
    if not held:
        raise DataError("every label stands for one text alone, so that none can be held out to measure with")
    rest = set(range(len(rows))).difference(held)
    return [rows[n] for n in sorted(rest)], [rows[n] for n in sorted(held)]


def _classes(train: list[_Row], options: Options) -> tuple[str, ...]:
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


def _rows(path: Path | None, options: Options) -> Iterator[_Row]:
    assert path is not None
    reader = {".jsonl": _json_lines, ".json": _json_lines, ".parquet": _parquet}.get(path.suffix.lower(), _csv)
    wanted = (options.text_column, options.label_column)
    try:
        for line, values in reader(path, wanted):
            text, label = values
            for name, value in zip(wanted, values, strict=True):
                if isinstance(value, list | dict):
                    raise DataError(f"{path}, line {line}: {name} is {str(value)[:60]}, not one value")
            if _is_missing(text):
                raise DataError(f"{path}, line {line}: there is no text", "Remove the line.")
            if _is_missing(label) or label == "nan":  # what tables write in its place
                raise DataError(f"{path}, line {line}: there is no label", "Label the text or remove the line.")
            if (half := _HALF.search(f"{text}{label}")) is not None:
                what = f"{path}, line {line}: half a character ({half[0]!a}), as where a text was cut within an emoji"
                raise DataError(what, "Remove it.")
            yield f"{path}, line {line}", str(text), str(label).strip()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 (byte {error.start})", "Save it as UTF-8.") from error


def _is_missing(value: Any) -> bool:
    return value is None or not str(value).strip() or (isinstance(value, float) and math.isnan(value))


_Pairs = Iterator[tuple[int, tuple[Any, Any]]]


def _csv(path: Path, wanted: tuple[str, str]) -> _Pairs:
    with tables.opened(path, wanted) as rows:
        try:
            _need(path, wanted, rows.columns)
            for row in rows:
                yield rows.line_number, (row[wanted[0]], row[wanted[1]])
        except csv.Error as error:
            raise DataError(f"{path}, line {rows.line_number}: {error}") from error


def _json_lines(path: Path, wanted: tuple[str, str]) -> _Pairs:
    for line, row in _objects(path):
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {line} is not an object", 'Write {"text": …, "label": …}.')
        _need(path, wanted, row)
        yield line, (row[wanted[0]], row[wanted[1]])


def _objects(path: Path) -> Iterator[tuple[int, Any]]:
    """The object of each line; or the elements of one list, counted as if they were lines."""
    with path.open(encoding="utf-8-sig") as file:
        is_list = file.readline().lstrip().startswith("[")
        file.seek(0)
        line = 1
        try:
            if is_list:
                yield from enumerate(json.load(file), 1)
                return
            for line, content in enumerate(file, 1):
                if content.strip():
                    yield line, json.loads(content)
        except UnicodeDecodeError:
            raise
        except ValueError as error:
            remedy = "It holds one object in each line, or a list of them."
            raise DataError(f"{path}, line {line} is not JSON: {error}", remedy) from error


def _parquet(path: Path, wanted: tuple[str, str]) -> _Pairs:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise UsageError(f"reading {path} needs pyarrow", "Install it: pip install pyarrow, or save as CSV.") from error
    try:
        _need(path, wanted, parquet.read_schema(path).names)
        table = parquet.read_table(path, columns=list(wanted))
    except ArrowException as error:
        raise DataError(f"{path} is not Parquet: {str(error).splitlines()[0]}") from error
    columns = (table.column(name).to_pylist() for name in wanted)
    yield from enumerate(zip(*columns, strict=True), 1)


def _need(path: Path, wanted: tuple[str, str], found: Any) -> None:
    missing = [name for name in wanted if name not in found]
    if missing:
        has = ", ".join(map(str, list(found)[:10])) or "none"
        remedy = f"It has {has}; name them with text_column and label_column."
        raise UsageError(f"{path} has no column {' and '.join(missing)}", remedy)


# Widths are rounded up to it, in training and in evaluation.
WIDTH_MULTIPLE = 8


class Picks(NamedTuple):
    """A batch before it is cut out: the numbers of its texts, on the device, and how many tokens wide it will be."""

    numbers: torch.Tensor
    width: int


def placed(batches: Sequence[torch.Tensor], lengths: torch.Tensor, device: torch.device) -> list[Picks]:
    """The batches of a whole pass in one copy: between its steps the host neither copies nor asks for a length."""
    widths = torch.stack([lengths[batch].max() for batch in batches]).tolist()
    numbers = torch.split(torch.cat(list(batches)).to(device), [len(batch) for batch in batches])
    return [Picks(picks, padded_length(width, WIDTH_MULTIPLE)) for picks, width in zip(numbers, widths, strict=True)]


class BucketSampler:
    """Batches of like length. ``begins_at`` tells the number, over the whole run, of the batch that comes next.

    The batches of all passes over the data form one stream, of which an epoch of the Trainer is a fixed number. With a
    batch size that is one pass. With a budget of tokens passes differ by a few batches, and an epoch ends near theirs.
    """

    def __init__(
        self,
        lengths: torch.Tensor,
        batching: Batching,
        rank: int,
        world: int,
        begins_at: Callable[[], int],
        device: torch.device,
    ) -> None:
        self.lengths, self.batching, self.device = lengths, batching, device
        self.rank, self.world = rank, world
        self.begins_at = begins_at
        self.served = 0  # samples handed out so far, on this rank
        self._pass, self._before = 0, 0
        self._plan = self._planned(0)
        self._length = len(self._plan)

    @property
    def batch_size(self) -> int | None:
        """Texts of a whole batch, as torch's samplers tell it; None with a budget of tokens."""
        return self.batching.batch_size

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Picks]:
        first = self.begins_at()
        for number in range(first, first + self._length):
            batch = self._find(number)
            self.served += len(batch.numbers)
            yield batch

    def _find(self, number: int) -> Picks:
        if number < self._before:
            self._pass, self._before, self._plan = 0, 0, self._planned(0)
        while number >= self._before + len(self._plan):
            self._before += len(self._plan)
            self._pass += 1
            self._plan = self._planned(self._pass)
        return self._plan[number - self._before]

    def _planned(self, epoch: int) -> list[Picks]:
        mine = self.batching.batches(self.lengths, epoch, self.world)[self.rank :: self.world]
        return placed(mine, self.lengths, self.device)


class ResidentTexts(Dataset[Any]):
    """The data set of such a DataLoader: a whole batch for its picks. ``mask_type``: what the model is given."""

    def __init__(self, texts: TextLoader) -> None:
        self.texts = texts
        self.mask_type = torch.int64

    def __len__(self) -> int:
        return len(self.texts.lengths)

    def __getitems__(self, picks: Picks) -> dict[str, torch.Tensor]:
        """The batch, on the device."""
        return self.texts.assemble(picks.numbers, picks.width, self.mask_type)


class TokenisedTexts(Dataset[Any]):
    """One text after the other as lists of token ids, for a stock DataLoader with workers."""

    def __init__(self, tokens: Tokens, labels: list[int]) -> None:
        self.tokens, self.labels = tokens, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> dict[str, Any]:
        start, stop = self.tokens.offsets[number : number + 2].tolist()
        return {"input_ids": self.tokens.flat[start:stop].tolist(), "labels": self.labels[number]}


def resident(tokens: Tokens, labels: list[int], pad_id: int, device: torch.device) -> ResidentTexts:
    """The tokens on the device."""
    # The batch size is the sampler's business.
    return ResidentTexts(feed.text(tokens, labels, batch_size=1, pad_id=pad_id, device=device, rank=0, world_size=1))


def loader(texts: ResidentTexts, batches: Any) -> DataLoader[Any]:
    """A DataLoader without workers: there is nothing left to do for them."""
    return DataLoader(
        texts,
        batch_sampler=batches,
        collate_fn=_as_it_is,
        generator=torch.Generator(),  # its own: the run's random numbers must not depend on how often it is started
    )


def sorted_batches(texts: ResidentTexts, size: int) -> list[Picks]:
    """All samples once, by length: for an evaluation, which no order matters to."""
    lengths = texts.texts.lengths
    return placed(torch.split(torch.sort(lengths, stable=True).indices, size), lengths, texts.texts.device)


def _as_it_is(batch: Any) -> Any:
    return batch
