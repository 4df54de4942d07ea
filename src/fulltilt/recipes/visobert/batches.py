"""Tokens on the device in batches of like length, served to a Trainer that expects a DataLoader.

A DataLoader asks a sampler for the numbers of a batch and its data set for that batch; here the data set cuts it out of
tokens that lie on the device. So the Trainer's own bookkeeping (skipping on resume, counting) works as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from fulltilt import feed
from fulltilt.feed.text import Batching, TextLoader, Tokens, padded_length

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
