"""One DataLoader: how it was made, and what passed through it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fulltilt.recorder.batches import count_bytes, kind_of, padding_share
from fulltilt.recorder.lines import LineTimes
from fulltilt.records import LoaderRecord

# A batch's size and padding are measured on the first few batches and then on every so many.
INSPECT_FIRST = 4
INSPECT_EVERY = 32


@dataclass
class LoaderTap:
    """One DataLoader: how it was made and what passed through it."""

    loader_id: int
    where: str | None
    given: tuple[str, ...]
    loader: Callable[[], Any]
    described: dict[str, Any] = field(default_factory=dict)
    asked_for: int | None = None  # indices in each request, where there is no batch size: 1 without batching
    asked_in_vain: int = 0
    eval_batches: int = 0
    passes: int = 0
    in_pass: bool = False
    made_by: str | None = None
    constructed: int = 0
    trains: bool = False
    batches: int = 0
    samples: int = 0
    counted: bool = False
    wait_s: float = 0.0
    waiting_since_s: float | None = None
    timed_wait_s: float = 0.0
    timed_cpu_s: float = 0.0
    first_wait_s: float = 0.0
    restart_s: float = 0.0
    batch_bytes: int | None = None
    batch_kind: str | None = None
    padding: float = 0.0
    padding_seen: int = 0
    sampler_lines: LineTimes = field(default_factory=LineTimes)
    # What live tuning has put in force instead of the loader's own arguments.
    in_force: dict[str, Any] = field(default_factory=dict)
    serving_workers: int | None = None  # of the pool that serves now, on trial or in force

    def retired(self) -> bool:
        """Whether this loader has served its passes, so that one made at the same place stands for it."""
        return self.loader() is None or (self.passes > 0 and not self.in_pass)

    @property
    def serial(self) -> bool:
        """Whether the training thread fetches its batches itself."""
        serving = self.serving_workers
        return (self.described.get("num_workers") if serving is None else serving) == 0

    @property
    def waited_s(self) -> float:
        """The waits so far, with the one under way: a loader that hangs never ends it."""
        since_s = self.waiting_since_s
        return self.wait_s + (time.perf_counter() - since_s if since_s is not None else 0.0)

    @property
    def wait_cpu_s(self) -> float:
        """CPU time of the training thread inside next(), from the waits in which it was measured."""
        return self.wait_s * self.timed_cpu_s / self.timed_wait_s if self.timed_wait_s else 0.0

    def inspect(self, batch: Any) -> None:
        """Look into some of the batches."""
        if self.batches > INSPECT_FIRST and self.batches % INSPECT_EVERY:
            return
        self.batch_bytes = max(self.batch_bytes or 0, count_bytes(batch))
        self.batch_kind = self.batch_kind or kind_of(batch)
        share = padding_share(batch)
        if share is not None:
            self.padding += share
            self.padding_seen += 1

    def record(self, trained: bool) -> LoaderRecord:
        """The loader as a record."""
        loader = self.loader()
        if loader is not None:
            self.described = describe(loader)
        role = "train" if trained else "eval" if self.batches else "unused"
        return LoaderRecord(
            loader_id=self.loader_id,
            role=role,  # type: ignore[arg-type]
            where=self.where,
            made_by=self.made_by,
            given=self.given,
            constructed=max(self.constructed, 1),  # none where it was made before anybody looked
            passes=self.passes,
            batches=self.batches,
            eval_batches=self.eval_batches,
            samples=self.samples if self.counted else None,
            batch_bytes=self.batch_bytes,
            batch_kind=self.batch_kind,
            wait_s=self.waited_s,
            wait_cpu_s=self.wait_cpu_s,
            first_wait_s=self.first_wait_s,
            restart_s=self.restart_s,
            padding_share=self.padding / self.padding_seen if self.padding_seen else None,
            sampler_lines=self.sampler_lines.top(),
            **{**self.described, **self.in_force},
        )


def describe(loader: Any) -> dict[str, Any]:
    """The arguments in force of a DataLoader, as plain values."""
    dataset, sampler = loader.dataset, getattr(loader, "sampler", None)
    name = type(sampler).__name__ if sampler is not None else None
    context: Any = getattr(loader, "multiprocessing_context", None)
    return {
        "dataset": type(_users_own(dataset)).__name__,
        "dataset_len": _length(_users_own(dataset)),
        "iterable": is_iterable(loader),
        "batch_size": _batch_size(loader),
        "num_workers": int(loader.num_workers),
        "prefetch_factor": loader.prefetch_factor,
        "pin_memory": bool(loader.pin_memory),
        "persistent_workers": bool(loader.persistent_workers),
        "drop_last": bool(loader.drop_last),
        "shuffle": {"RandomSampler": True, "SequentialSampler": False}.get(name or ""),
        "sampler": name,
        "collate": _name(loader.collate_fn),
        "start_method": context.get_start_method() if context is not None else None,
    }


def _users_own(dataset: Any) -> Any:
    """The data set that the user knows: the engine puts one of its own around it."""
    return getattr(dataset, "samples", dataset) if type(dataset).__module__.startswith("fulltilt.") else dataset


def is_iterable(loader: Any) -> bool:
    """Whether a loader's data set has no indices to draw."""
    from torch.utils.data import IterableDataset

    return isinstance(loader.dataset, IterableDataset)


def _batch_size(loader: Any) -> int | None:
    size = loader.batch_size
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:
        return None


def _name(function: Any) -> str | None:
    return getattr(function, "__qualname__", None) or type(function).__name__
