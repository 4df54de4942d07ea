"""``feed.text``: pre-tokenised text in batches of similar lengths, assembled on the device.

The tokens of all samples are in one tensor. Each epoch is shuffled; within windows of the shuffled order samples are
sorted by length and cut into batches, which are shuffled again. Little is padding, and batches differ in every epoch.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fulltilt.errors import DataError, UsageError
from fulltilt.feed.epoch_order import PositionedLoader, is_whole, ranks, require, saved_position
from fulltilt.feed.progress import progress
from fulltilt.feed.random_numbers import as_int64
from fulltilt.feed.sample_store import device_or_default


@dataclass(frozen=True)
class Tokens:
    """Token ids of all samples end to end (int32), and where each sample begins; the last offset is the end."""

    flat: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def of(cls, sequences: Iterable[Sequence[int]], *, max_length: int | None = None) -> Tokens:
        """Tokens from lists of ids, each truncated to ``max_length``. Raises DataError for other ids."""
        ids, offsets = array("i"), [0]
        for number, sequence in enumerate(sequences):
            try:
                ids.extend(sequence[:max_length])
            except (TypeError, OverflowError) as error:
                raise DataError(
                    f"a text has to be a list of token ids, but text {number} is not: {error}",
                    "Make them with feed.tokenise(texts, tokenizer).",
                ) from error
            offsets.append(len(ids))
        flat = torch.frombuffer(ids, dtype=torch.int32) if ids else torch.empty(0, dtype=torch.int32)
        return cls(flat, torch.tensor(offsets, dtype=torch.int64))

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens of each sample."""
        return self.offsets.diff()


def tokenise(texts: Iterable[str], tokenizer: Callable[..., Any], *, max_length: int | None = None) -> Tokens:
    """Run ``tokenizer`` (a list of texts to ``input_ids``) over all texts once, a thousand at a time.

    Raises UsageError and DataError.
    """
    if isinstance(texts, str | Mapping) or not isinstance(texts, Iterable):
        raise UsageError(f"the texts are {type(texts).__name__}, not a list of texts")
    right = max_length is None or is_whole(max_length, at_least=1)
    require("max_length", max_length, right, "a whole number of at least 1")
    every = list(texts)
    ids: list[list[int]] = []
    starts = range(0, len(every), 1000)
    for start in progress(starts, len(starts), "Tokenising"):
        part = every[start : start + 1000]
        for number, one in enumerate(part, start):
            if one is None or one != one:  # an empty cell
                raise DataError(
                    f"text {number} is {one}", "Leave out the rows that have no text, or fill them with ''."
                )
        found = tokenizer(part)
        named = hasattr(found, "keys") and "input_ids" in found.keys()  # noqa: SIM118 - any object with keys
        made = found["input_ids"] if named else found if isinstance(found, list) else None
        if made is None or len(made) != len(part):
            got = f"{type(found).__name__}" if made is None else f"{len(made)} lists"
            raise DataError(f"the tokenizer gives {got} for {len(part)} texts", "It has to give input_ids for each.")
        ids.extend(made)
    return Tokens.of(ids, max_length=max_length)


# The window in batches: large enough for nearly equal lengths in a batch, small against the epoch.
WINDOW_BATCHES = 64


# --------------------------------------------------------------------------- batching


@dataclass(frozen=True)
class Batching:
    """Divides samples into batches: by count, or by a budget of tokens, padding included."""

    batch_size: int | None = None
    tokens_per_batch: int | None = None
    window: int | None = None
    multiple: int = 8
    shuffle: bool = True
    seed: int = 0
    drop_last: bool = False

    def __post_init__(self) -> None:
        if (self.batch_size is None) == (self.tokens_per_batch is None):
            raise UsageError("give either batch_size or tokens_per_batch")
        for name in ("batch_size", "tokens_per_batch", "window", "multiple"):
            number = getattr(self, name)
            require(name, number, number is None or is_whole(number, at_least=1), "a whole number of at least 1")

    def batches(self, lengths: torch.Tensor, epoch: int, world_size: int = 1) -> list[torch.Tensor]:
        """The batches of ``epoch`` for all ranks: r, r + world_size, … are rank r's, and of similar length."""
        generator = torch.Generator().manual_seed(as_int64(self.seed + epoch))
        count = len(lengths)
        order = torch.randperm(count, generator=generator) if self.shuffle else torch.arange(count)
        window = self.window or WINDOW_BATCHES * self._typical_batch(lengths)
        found: list[torch.Tensor] = []
        left: list[torch.Tensor] = []
        for part in torch.split(order, window):
            cut = self._cut(self._sorted(part, lengths), lengths)
            # The remainders of all windows are put together, so that only one batch of an epoch is short.
            if self.batch_size is not None and cut and len(cut[-1]) < self.batch_size:
                left.append(cut.pop())
            found += cut
        if left:
            found += self._cut(self._sorted(torch.cat(left), lengths), lengths)
        if self.drop_last and self.batch_size is not None:
            found = [batch for batch in found if len(batch) == self.batch_size]
        return self._mixed(found, generator, world_size)

    def _sorted(self, part: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        # Stable, so that samples of one length keep their random order.
        return part[torch.sort(lengths[part], stable=True).indices] if self.shuffle else part

    def _cut(self, part: torch.Tensor, lengths: torch.Tensor) -> list[torch.Tensor]:
        if self.batch_size is not None:
            return list(torch.split(part, self.batch_size))
        assert self.tokens_per_batch is not None
        cut, start, longest = [], 0, 0
        for place, length in enumerate(lengths[part].tolist()):
            width = padded_length(length, self.multiple)
            longest = max(longest, width)
            if place > start and longest * (place - start + 1) > self.tokens_per_batch:
                cut.append(part[start:place])
                start, longest = place, width
        return [*cut, part[start:]]

    def _mixed(self, found: list[torch.Tensor], generator: torch.Generator, world_size: int) -> list[torch.Tensor]:
        """Shuffle batches in groups of one per rank, so that the ranks of a step have similar work."""
        if world_size > 1:
            short = -len(found) % world_size
            found = found + (found * world_size)[:short]  # repeated as by DistributedSampler: ranks need equally many
        if not self.shuffle:
            return found
        groups = [found[start : start + world_size] for start in range(0, len(found), world_size)]
        order = torch.randperm(len(groups), generator=generator).tolist()
        if (size := self.batch_size) is not None:  # short batches come last, as in torch's loaders
            order.sort(key=lambda group: min(map(len, groups[group])) < size)
        return [batch for group in order for batch in groups[group]]

    def _typical_batch(self, lengths: torch.Tensor) -> int:
        if self.batch_size is not None:
            return self.batch_size
        assert self.tokens_per_batch is not None
        return max(1, self.tokens_per_batch // max(1, int(lengths.float().mean())))


def padded_length(length: int, multiple: int) -> int:
    """``length`` rounded up to ``multiple``, for compiled models and tensor cores."""
    return max(multiple, math.ceil(length / multiple) * multiple)


# --------------------------------------------------------------------------- the loader


class TextLoader(PositionedLoader):
    """Batches ``{"input_ids", "attention_mask", "labels"}`` of similar lengths, on the device.

    By count (``batch_size``) or by budget (``tokens_per_batch``, padding included). ``window`` is how many shuffled
    samples are sorted together. ``loader.padding_waste`` is measured over the batches served. Raises UsageError.
    """

    def __init__(
        self,
        tokens: Tokens | Iterable[Sequence[int]],
        labels: Any = None,
        *,
        batch_size: int | None = None,
        tokens_per_batch: int | None = None,
        window: int | None = None,
        pad_id: int = 0,
        multiple: int = 8,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        device: torch.device | str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(pad_id, int):
            raise UsageError(
                f"pad_id is {pad_id!r}; it must be the number of a token", "The tokenizer knows it: pad_token_id."
            )
        if not isinstance(tokens, Tokens):
            tokens = Tokens.of(tokens)
        if not len(tokens.lengths):
            raise DataError("there is no text to train on")
        self.device = device = device_or_default(device)
        self.rank, self.world_size = ranks(rank, world_size)
        self.batching = Batching(batch_size, tokens_per_batch, window, multiple, shuffle, seed, drop_last)
        self.pad_id = pad_id
        self._labels = None if labels is None else _labels(labels, len(tokens.lengths)).to(device)
        self.lengths = tokens.lengths
        # Token ids are small and always resident. A batch takes few operations, since each costs the host a launch:
        # hence start and end in one tensor, and padding after the last sample, where a batch may reach.
        self._bounds = torch.stack([tokens.offsets[:-1], tokens.offsets[1:]], dim=1).to(device)
        widest = padded_length(int(self.lengths.max()), multiple)
        self._flat = torch.cat([tokens.flat, tokens.flat.new_full((widest,), pad_id)]).to(device)
        self._steps = torch.arange(widest, device=device)
        self._real = self._padded = 0
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="fulltilt-order")
        self._planned: dict[int, Future[list[torch.Tensor]]] = {}

    @property
    def padding_waste(self) -> float | None:
        """The share of padding in the tokens served so far; None before the first batch."""
        return 1 - self._real / self._padded if self._padded else None

    def __len__(self) -> int:
        """Batches of the next epoch; with a token budget epochs may differ by a few."""
        return len(self._plan(self._next[0]))

    def state_dict(self) -> dict[str, Any]:
        """The position: after loading it, the next batch is the one that would come now."""
        epoch, batch = self._at
        return {"epoch": epoch, "batch": batch, "world_size": self.world_size, **asdict(self.batching)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``. Raises UsageError for one of a loader with other batches."""
        found = saved_position(state)
        for name, mine in self.state_dict().items():
            if name not in ("epoch", "batch") and (saved := state.get(name, mine)) != mine:
                raise UsageError(
                    f"the saved loader had {name} {saved}, this one has {mine}, which makes other batches",
                    "Resume with the same value, or restart the epoch with set_epoch.",
                )
        self.begin_at(*found)

    def _pass(self) -> Iterator[dict[str, torch.Tensor]]:
        epoch, first = self._begin()
        batches = self._plan(epoch)[first:]
        self._planned = {epoch + 1: self._planner.submit(self._make_plan, epoch + 1)}
        # Lengths for the host, and one upload of the indices of all batches.
        longest = [int(self.lengths[batch].max()) for batch in batches]
        real = [int(self.lengths[batch].sum()) for batch in batches]
        every = torch.split(torch.cat(batches).to(self.device), list(map(len, batches))) if batches else ()
        for number, (picks, most, tokens) in enumerate(zip(every, longest, real, strict=True), first):
            width = padded_length(most, self.batching.multiple)
            self._real += tokens
            self._padded += width * len(picks)
            self._at = epoch, number + 1  # a checkpoint after its step resumes after it
            yield self._assembled(picks, width)
        self._at = epoch + 1, 0

    def _assembled(self, picks: torch.Tensor, width: int) -> dict[str, torch.Tensor]:
        """The batch of samples ``picks`` (on the device), ``width`` tokens wide."""
        bounds = self._bounds[picks]
        places = bounds[:, :1] + self._steps[:width]
        inside = places < bounds[:, 1:]
        ids = torch.where(inside, self._flat[places], self.pad_id).long()
        batch = {"input_ids": ids, "attention_mask": inside.long()}
        if self._labels is not None:
            batch["labels"] = self._labels[picks]
        return batch

    def _plan(self, epoch: int) -> list[torch.Tensor]:
        if epoch not in self._planned:
            self._planned = {epoch: self._planner.submit(self._make_plan, epoch)}
        return self._planned[epoch].result()

    def _make_plan(self, epoch: int) -> list[torch.Tensor]:
        return self.batching.batches(self.lengths, epoch, self.world_size)[self.rank :: self.world_size]


def _labels(labels: Any, count: int) -> torch.Tensor:
    try:
        found = torch.as_tensor(labels)
    except Exception as error:
        raise DataError(f"the labels are not numbers: {error}", "Give each class a number.") from error
    if not found.ndim or len(found) != count:
        raise DataError(f"there are {count} texts and {len(found) if found.ndim else 'not a list of'} labels")
    return found


text = TextLoader
