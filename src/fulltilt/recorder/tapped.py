"""Any iterable of batches with the loader's meter on it, for loops that draw from no DataLoader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from fulltilt.recorder.loader_tap import LoaderTap, LoaderTaps, TappedIterator
from fulltilt.recorder.stacks import users_line

Item = TypeVar("Item")


class TappedIterable(Generic[Item]):
    """Any iterable of batches with the loader's meter on it."""

    def __init__(self, taps: LoaderTaps, batches: Iterable[Item]) -> None:
        self._taps = taps
        self._batches = batches
        where, _ = users_line()
        self._tap = tap_on(taps, described(batches), where, made_by="script")

    def __iter__(self) -> Iterator[Item]:
        self._tap.passes += 1
        return TappedIterator(self._taps, self._tap, iter(self._batches))

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def tap_on(taps: LoaderTaps, what: dict[str, Any], where: str | None, made_by: str | None = None) -> LoaderTap:
    """A new tap for something that is no DataLoader: what ``what`` says of it stays as it is."""
    tap = LoaderTap(len(taps.all), where, (), lambda: None, what, made_by=made_by)
    taps.all.append(tap)
    return tap


def described(batches: Iterable[Any], **known: Any) -> dict[str, Any]:
    """What a loader record says of an iterable; what is not ``known`` is as for one on the training thread."""
    return {
        "dataset": type(batches).__name__,
        "dataset_len": None,
        "iterable": True,
        "batch_size": None,
        "num_workers": 0,
        "prefetch_factor": None,
        "pin_memory": False,
        "persistent_workers": False,
        "drop_last": False,
        "shuffle": None,
        "sampler": None,
        "collate": None,
        "start_method": None,
        **known,
    }
