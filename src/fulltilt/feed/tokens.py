"""Texts as numbers: the token ids of all samples end to end, made once and kept in a file."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fulltilt.errors import DataError, MachineError, UsageError
from fulltilt.feed.progress import progress
from fulltilt.store.owned_folder import write_named_file

# How torch writes the second name of what ``save`` saves: a file with it holds tokens.
_SIGNATURE = b"X\x07\x00\x00\x00offsets"


@dataclass(frozen=True)
class Tokens:
    """Token ids of all samples end to end (int32), and where each sample begins; the last offset is the end."""

    flat: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def of(cls, sequences: Iterable[Sequence[int]], *, max_length: int | None = None) -> Tokens:
        """Tokens from lists of ids, each cut to ``max_length``. Raises DataError for anything but whole numbers."""
        if not isinstance(sequences, Iterable):
            raise _no_ids(f"the texts are {type(sequences).__name__}")
        ids: list[int] = []
        offsets = [0]
        for number, sequence in enumerate(sequences):
            try:
                ids.extend(sequence[:max_length] if max_length is not None else sequence)
            except TypeError as error:
                raise _no_ids(f"text {number} is {type(sequence).__name__}") from error
            offsets.append(len(ids))
        return cls(_flat(ids), torch.tensor(offsets, dtype=torch.int64))

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens of each sample."""
        return self.offsets.diff()

    def save(self, path: str | Path) -> None:
        """Write them to ``path``, whole or not at all. Raises MachineError, and ForeignFiles for a file of others."""
        path = Path(path)
        written = io.BytesIO()
        torch.save({"flat": self.flat, "offsets": self.offsets}, written)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_named_file(path, written.getvalue(), signature=_SIGNATURE)
        except OSError as error:
            raise MachineError(f"{path} cannot be written: {error.strerror or error}") from error

    @classmethod
    def load(cls, path: str | Path) -> Tokens:
        """Read what ``save`` wrote. Raises DataError."""
        try:
            read = torch.load(path, weights_only=True)
            return cls(read["flat"], read["offsets"])
        except FileNotFoundError as error:
            raise UsageError(f"{path} does not exist") from error
        except Exception as error:
            raise DataError(f"{path} does not hold tokens: {error}", "Tokenise the texts anew.") from error


def _flat(ids: list[int]) -> torch.Tensor:
    try:
        flat = torch.tensor(ids) if ids else torch.empty(0, dtype=torch.int32)
    except Exception as error:
        raise _no_ids(" ".join(str(error).split())) from error
    if flat.ndim != 1 or flat.is_floating_point() or flat.is_complex():
        raise _no_ids(f"{flat.dtype} of {flat.ndim} dimensions")
    if len(flat) and not -(2**31) <= int(flat.min()) <= int(flat.max()) < 2**31:
        raise _no_ids(f"{int(flat.min())} to {int(flat.max())} do not fit into 32 bits")
    return flat.to(torch.int32)


def _no_ids(found: str) -> DataError:
    return DataError(
        f"a text has to be a list of token ids: {found}", "Make them with feed.tokenise(texts, tokenizer)."
    )


def _refuse_what_is_no_text(texts: list[Any], first: int) -> None:
    """Nothing (None, NaN of an empty cell) among them: a tokenizer would end in a traceback that names none."""
    for number, text in enumerate(texts, first):
        if text is None or text != text:
            raise DataError(f"text {number} is {text}", "Leave out the rows that have no text, or fill them with ''.")


def tokenise(
    texts: Iterable[str], tokenizer: Callable[..., Any], *, max_length: int | None = None, shown: bool | None = None
) -> Tokens:
    """Run ``tokenizer`` (a list of texts to ``input_ids``) over all texts once, a thousand at a time.

    Raises UsageError and DataError.
    """
    if isinstance(texts, str | Mapping) or not isinstance(texts, Iterable):
        raise UsageError(f"the texts are {type(texts).__name__}, not a list of texts")
    if max_length is not None and (type(max_length) is not int or max_length < 1):
        raise UsageError(f"max_length is {max_length!r}; it must be a whole number of at least 1")
    every = list(texts)
    ids: list[list[int]] = []
    starts = range(0, len(every), 1000)
    for start in progress(starts, len(starts), "Tokenising", shown=shown):
        part = every[start : start + 1000]
        _refuse_what_is_no_text(part, start)
        found = tokenizer(part)
        named = hasattr(found, "keys") and "input_ids" in found.keys()  # noqa: SIM118 - any object with keys
        made = found["input_ids"] if named else found if isinstance(found, list) else None
        if made is None or len(made) != len(part):
            got = f"{type(found).__name__}" if made is None else f"{len(made)} lists"
            raise DataError(f"the tokenizer gives {got} for {len(part)} texts", "It has to give input_ids for each.")
        ids.extend(made)
    return Tokens.of(ids, max_length=max_length)
