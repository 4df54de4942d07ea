"""Where a loader stands: the next batch of the pass under way, and where the pass after it begins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from fulltilt.errors import UsageError
from fulltilt.feed.order import RANDOM_SAMPLERS, BatchOrder, is_whole, sampler_of, step_samples

AGAIN = (
    "a loader for such a data set has begun with epoch 0 before, and this one draws the same order and augmentation "
    "again: keep one loader for all epochs, or call loader.set_epoch(epoch)"
)


class Standing:
    """Epoch and batch, counted as batches are handed out. ``next`` is where the next pass begins."""

    def __init__(self) -> None:
        self.epoch = self.batch = 0
        self.next = 0, 0
        self._positioned = False  # whether somebody has said where the next pass begins
        self._told: int | None = None  # the epoch that the sampler was told last

    def begin_at(self, epoch: int, batch: int) -> None:
        """Let the next pass begin there. Raises UsageError."""
        self.next = self.epoch, self.batch = position(epoch, batch)
        self._positioned = True

    def begin(self, order: BatchOrder | None = None) -> tuple[int, int]:
        """Epoch and batch of a pass that begins: as told here, else as the sampler was told, else the next one."""
        epoch, start = self.next
        told = None if order is None else told_epoch(order)
        if not self._positioned and told is not None and told != self._told:
            epoch, start = told, 0
        self._told, self._positioned = epoch, False
        self.next = epoch + 1, 0
        self.epoch, self.batch = epoch, start
        return epoch, start

    @property
    def counts_by_itself(self) -> bool:
        """Whether the next pass is the loader's first, and nobody has said which epoch that is."""
        return self.next == (0, 0) and not self._positioned

    def handed_out(self, epoch: int, number: int) -> None:
        """Batch ``number`` of ``epoch`` was: a checkpoint taken after its step must not see it again."""
        self.epoch, self.batch = epoch, number + 1

    def ended(self, epoch: int) -> None:
        """The pass over ``epoch`` is over."""
        self.epoch, self.batch = epoch + 1, 0


_begun: Counter[tuple[Any, ...]] = Counter()


def begins_again(order: BatchOrder, *data: Any) -> bool:
    """Whether a loader begins with epoch 0 for the second time in this process, with the same seed, size and ``data``.

    One that is made in every epoch does, and gives the same order and augmentation each time.
    """
    _begun[order.seed, order.batch_size, *data] += 1
    return _begun[order.seed, order.batch_size, *data] == 2


def is_shuffled(order: BatchOrder) -> bool:
    """Whether epochs differ in their order."""
    random = isinstance(sampler_of(order), RANDOM_SAMPLERS)
    return random or bool(getattr(order, "shuffle", False))


def told_epoch(order: BatchOrder) -> int | None:
    """The epoch that the sampler stands at, as DistributedSampler's ``set_epoch`` keeps it; None where it has none."""
    sampler = sampler_of(order)
    epoch: Any = getattr(sampler, "epoch", None)
    return int(epoch) if callable(getattr(sampler, "set_epoch", None)) and is_whole(epoch) else None


def position(epoch: int, batch: int) -> tuple[int, int]:
    """Both as they are, where a pass can begin. Raises UsageError: from -1 on it would be the last batch alone."""
    if not (is_whole(epoch) and is_whole(batch)):
        raise UsageError(f"batch {batch!r} of epoch {epoch!r}: both must be whole numbers of at least 0")
    return int(epoch), int(batch)


def saved_position(state: Mapping[str, Any]) -> tuple[int, int]:
    """Epoch and number of the next batch in a loader's ``state``. Raises UsageError if it is none."""
    if not isinstance(state, Mapping) or not {"epoch", "batch"} <= state.keys():
        raise UsageError("this is not the state of a loader: it has no epoch and batch")
    return position(state["epoch"], state["batch"])


def resumed_at(state: Mapping[str, Any], order: BatchOrder) -> tuple[int, int]:
    """Epoch and number of the next batch of ``order`` after a loader's ``state``. Raises UsageError if it has none."""
    epoch, batch = saved_position(state)
    if (seed := state.get("seed", order.seed)) != order.seed:
        raise UsageError(f"the saved loader had seed {seed}, this one has {order.seed}")
    saved, mine = state.get("step_samples"), step_samples(order)
    if not saved or not mine or saved == mine:
        return epoch, batch
    if batch * saved % mine:
        raise UsageError(
            f"the saved loader stands after {batch * saved} samples, in the middle of a batch of {mine}",
            "Go on with the batch size and ranks that it had, or begin the epoch anew with set_epoch.",
        )
    return epoch, batch * saved // mine
