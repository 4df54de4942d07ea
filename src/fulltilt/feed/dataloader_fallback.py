"""Data sets that cannot be kept as fixed-shape tensors: torch's own DataLoader with tuned settings, then the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from fulltilt.feed.dataset_objects import attributes, changed_attribute
from fulltilt.feed.epoch_order import BatchOrder, draws_of, sample_of
from fulltilt.feed.sample_layout import mapping_like, own_move, sequence_of
from fulltilt.feed.sample_reader import BadSamples, Failure, ShapesDiffer, failure_of


class FallbackLoader:
    """Batches of ``dataset`` through ``collate_fn``, moved to the device without waiting."""

    def __init__(
        self,
        dataset: Any,
        order: BatchOrder,
        collate_fn: Callable[..., Any] | None,
        workers: int,
        device: torch.device,
        bad: BadSamples,
        on_bad: Callable[[Failure], None],
    ) -> None:
        self._samples, self._collate = _Samples(dataset), _Collate(collate_fn or default_collate)
        self._order, self._workers, self._device = order, workers, device
        self._bad, self._on_bad = bad, on_bad
        self._loader: DataLoader[Any] | None = None  # None while a pass has it
        self._attributes = attributes(dataset)

    def batches(self, epoch: int, start: int) -> Iterator[tuple[Any, torch.Tensor]]:
        """The batches of ``epoch`` from number ``start`` on, each with the numbers of its draws."""
        drawn = [self._bad.without_bad(batch) for batch in draws_of(self._order, epoch)[start:]]
        loader, self._loader = self._loader_for_now(), None
        batches: _EpochBatches = loader.batch_sampler  # type: ignore[assignment]
        # Drawn once: a random sampler would give others when asked again.
        batches.drawn = [batch for batch in drawn if len(batch)]
        try:
            made = iter(loader)
            for indices in drawn:
                batch, failures, refused = next(made) if len(indices) else (None, [], None)
                if refused is not None:
                    raise ShapesDiffer(
                        f"torch cannot make a batch of samples {sample_of(indices).tolist()}: {refused}",
                        "Put samples of one shape into a batch, or give a collate_fn that pads.",
                    )
                for failure in self._bad.note(failures):
                    self._on_bad(failure)
                left = self._bad.without_bad(indices)
                yield to_device(batch, self._device), left.to(self._device, non_blocking=True)
        finally:
            self._loader = loader

    def _loader_for_now(self) -> DataLoader[Any]:
        """One that no other pass is using, whose workers have the data set as it is now."""
        now = attributes(self._samples.dataset)
        if self._loader is not None and changed_attribute(self._attributes, now) is None:
            return self._loader
        self._attributes = now
        return DataLoader(
            self._samples,
            batch_sampler=_EpochBatches(),
            num_workers=self._workers,
            collate_fn=self._collate,
            pin_memory=self._device.type == "cuda",
            persistent_workers=self._workers > 0,
        )


class _EpochBatches:
    """A batch sampler that gives what it is told to; persistent workers need one object for all epochs."""

    def __init__(self) -> None:
        self.drawn: list[torch.Tensor] = []

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.drawn:
            yield sample_of(batch).tolist()

    def __len__(self) -> int:
        return len(self.drawn)


class _Samples(Dataset[Any]):
    """The data set, with a failure in the place of a sample that cannot be read."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:
            return failure_of(self.dataset, index, error)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if hasattr(self.dataset, "__getitems__"):
            try:
                return list(self.dataset.__getitems__(indices))
            except Exception:  # read one by one, the culprit can be named
                pass
        return [self[index] for index in indices]


class _Collate:
    """A batch of the samples that could be read, what happened to the others, and why it could not be made."""

    def __init__(self, collate: Callable[..., Any]) -> None:
        self.collate = collate

    def __call__(self, samples: list[Any]) -> tuple[Any, list[Failure], str | None]:
        failures = [sample for sample in samples if isinstance(sample, Failure)]
        good = [sample for sample in samples if not isinstance(sample, Failure)]
        try:
            return self.collate(good) if good else None, failures, None
        except Exception as error:
            if self.collate is not default_collate:
                raise  # the user's own code: its traceback tells more
            return None, failures, " ".join(str(error).split())


def to_device(value: Any, device: torch.device) -> Any:
    """A batch of any structure on ``device``; tensors without waiting. A class that has ``to(device)`` moves itself."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return mapping_like(value)({key: to_device(item, device) for key, item in value.items()})
    if (move := own_move(value)) is not None:
        return move(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, list | tuple):
        return sequence_of(type(value), [to_device(item, device) for item in value])
    return value
