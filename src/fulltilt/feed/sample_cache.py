"""Reads samples with workers and keeps them on a tier; checks what is kept, and drops it if it is wrong.

The samples of a batch come from the store if they are kept, else from the workers.
"""

from __future__ import annotations

import contextlib
import logging
import math
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fulltilt.errors import DataError, FulltiltError, UsageError
from fulltilt.feed.dataset_check import DECLARE, Inspection
from fulltilt.feed.dataset_objects import HeldState
from fulltilt.feed.disk_cache import CacheFull, DiskStore, default_cache_dir, open_cache
from fulltilt.feed.epoch_order import sample_of, spread
from fulltilt.feed.sample_reader import BadSamples, Failure, SampleReader
from fulltilt.feed.sample_store import Store, pin, shared_bytes
from fulltilt.feed.tiers import Choice, FreeBytes, Residency, Tier, choose_tier, measure_free_bytes
from fulltilt.feed.worker_pool import WorkerPool, in_child_process

# Kept samples that are compared with the data set, in ever fewer epochs.
COMPARED_SAMPLES = 2
# Samples of a disk cache of an earlier run that are compared with the data set.
CHECKED_SAMPLES = 8
# After so many steps the model's memory is known: weights, activations, optimizer state.
SETTLED_AFTER_BATCHES = 3
# Batches that workers read ahead: enough to bridge a slow sample or a validation.
SLOTS = 4
# Above this only two: one is read while the other is copied.
SLOT_BYTES = 2 * 1024**3

log = logging.getLogger("fulltilt.feed")


class Notes(list[str]):
    """Decisions in words; each is also logged."""

    def say(self, text: str, level: int = logging.INFO) -> None:
        """Add a note."""
        self.append(text)
        log.log(level, text)


@dataclass
class HostRows:
    """A batch, or the part of it that a device ``store`` lacks, in host memory.

    ``samples`` are those of the ``rows`` to be written to the device store.
    """

    draws: torch.Tensor
    rows: torch.Tensor
    samples: torch.Tensor
    store: Store | None = None


# The draws of a batch, those of them to read, and the store to keep them.
_Plan = tuple[torch.Tensor, torch.Tensor, Store | None]


class SampleCache:
    """Reads batches in order, and keeps their samples on a ``tier`` if they are deterministic."""

    def __init__(
        self,
        dataset: Any,
        found: Inspection,
        batch_size: int,
        *,
        asked: Residency,
        device: torch.device,
        seed: int,
        workers: int,
        bad: BadSamples,
        reserve_bytes: int | None = None,
        cache_dir: str | Path | None = None,
        cache_key: str | None = None,
        on_worker_start: Callable[[], None] | None = None,
    ) -> None:
        assert found.layout is not None
        why = found.random_because
        checked = why is None and asked != "none" and not found.declared
        self.reader = SampleReader(dataset, found.layout, seeded=why is not None, checked=checked, seed=seed)
        self.layout, self.batch_size, self.workers = found.layout, batch_size, workers
        self.dataset, self.asked, self.bad, self.device = dataset, asked, bad, device
        self.store: Store | None = None  # it may come and go
        self._on_worker_start = on_worker_start
        self._idle: list[WorkerPool] = []
        self._in_use: weakref.WeakSet[WorkerPool] = weakref.WeakSet()
        self.notes = Notes()
        self.samples = len(dataset)
        self.tier: Tier = "none"
        self.undecided = why is None and asked != "none"  # whether, and where, to keep samples
        self.waits_for_model = asked == "auto" and device.type == "cuda" and reserve_bytes is None
        self._complete = self._found_random = False
        self._reserve_bytes = reserve_bytes
        self._cache_key = cache_key if cache_key is not None else getattr(dataset, "cache_key", None)
        self._cache_dir = Path(cache_dir) if cache_dir is not None else default_cache_dir()
        self._epochs_served, self._declared = 0, found.declared
        self._held: HeldState | None = None  # the data set's when it was last read from
        self._reads_here = not workers  # in this process, and so may change the data set itself
        # Raises for a tier that is unknown or that this machine lacks, now and not in mid-epoch.
        choose_tier(0, self._free_bytes(model_has_run=True), asked)
        if why is not None:
            self.notes.say(f"read by {workers} workers on every draw: {why}. {DECLARE}")
            if asked not in ("auto", "none"):
                raise UsageError(f"the data set cannot be kept in {asked}: {why}", f"Use residency='auto'. {DECLARE}")

    def begin_epoch(self, epoch: int) -> None:
        """Choose the tier if that is possible already; check what is kept."""
        if self._found_random and not self.reader.seeded:
            self.stop_workers()
            self.reader.seeded = True  # new workers seed each sample
        changed = None if self._held is None else self._held.change()
        if changed is not None:
            self.stop_workers()  # they were forked with the old data set
        if changed is not None or self._held is None:
            self._held = HeldState(self.dataset)
        self._reads_here = not self.workers and not (self._complete and self.store is not None)
        if self.undecided:
            if not self.waits_for_model:
                self.settle(model_has_run=False)
        elif self.store is not None:
            self._check(epoch, changed)

    def batches_trained(self, number: int) -> None:
        """So many batches of the epoch were trained on: the model's memory may be known now."""
        if number == SETTLED_AFTER_BATCHES and self.undecided:
            self.settle(model_has_run=True)

    def end_epoch(self) -> None:
        """Once every sample is kept, end the workers and make a disk cache permanent."""
        if self.undecided:
            self.settle(model_has_run=True)  # an epoch of three batches or fewer
        store, bad = self.store, self.bad
        if store is None or self._complete or not bool((store.has(torch.arange(self.samples)) | bad.bad).all()):
            return
        self.stop_workers()
        try:
            if isinstance(store, DiskStore) and not bad.failures:
                store.finish()
        except CacheFull as full:  # some disks report it only at fsync
            self._on_full(full)
            return
        self._complete = True
        self.notes.say(f"all {self.samples} samples are kept ({self.tier})")

    def leave_epoch(self) -> None:
        """The epoch is over, or was left early."""
        if self._reads_here:
            self._held = HeldState(self.dataset)

    @torch.inference_mode(False)  # may run in an evaluation
    def settle(self, *, model_has_run: bool) -> None:
        """Decide the tier, and begin to keep what is read."""
        need = self.samples * self.layout.row_bytes
        choice = choose_tier(need, self._free_bytes(model_has_run=model_has_run), self.asked)
        self.undecided = False
        store, how = None, "training goes on from the source"
        try:
            store, how = self._make(choice.tier)
        except CacheFull as full:
            choice = Choice("none", str(full))
        except FulltiltError as refused:  # by a folder, a disk or the system
            if self.asked != "auto":
                raise
            choice = Choice("none", refused.what)
        self.tier = choice.tier
        self.notes.say(f"residency {choice.tier}: {choice.reason}" + (f" ({how})" if how else ""))
        if isinstance(store, DiskStore):
            changed = self._first_changed(store, spread(self.samples, CHECKED_SAMPLES))
            if changed is not None:
                store.delete_file()
                store.close()
                told = f"the cache was refused: its sample {changed} is not what the data set returns"
                self._drop(f"{told}; training goes on from the source", fatal=False)
                return
        self.store = store  # last: other threads read from it at once

    def lacking(self, batches: list[torch.Tensor]) -> torch.Tensor:
        """The samples of ``batches`` that have to be read from the data set, each once."""
        asked = sample_of(self.bad.without_bad(torch.cat(batches))) if batches else torch.empty(0, dtype=torch.int64)
        lacking: torch.Tensor = torch.unique(asked if self.store is None else asked[~self.store.has(asked)])
        return lacking

    # ----------------------------------------------------------------- workers

    def take_pool(self) -> WorkerPool:
        """Workers for one pass; call it on the main thread, where forking is safest.

        An unfinished iterator keeps its workers and does not block the next pass.
        """
        if self._idle:
            pool = self._idle.pop()
        else:
            small = SLOTS * self.batch_size * self.layout.row_bytes <= SLOT_BYTES
            pool = WorkerPool(
                self.reader,
                self.layout.row_bytes,
                self.batch_size,
                workers=self.workers,
                slots=(SLOTS if small else 2) if self.workers else 1,
                device=self.device,
                on_worker_start=self._on_worker_start,
            )
        self._in_use.add(pool)
        return pool

    def give_back(self, pool: WorkerPool) -> None:
        """Keep the workers of a finished pass for the next one."""
        self._in_use.discard(pool)
        if pool.closed or pool.retired or self._idle:
            pool.close()
        else:
            self._idle.append(pool)

    def stop_workers(self) -> None:
        """End the workers that no pass uses; those of a running pass end with it."""
        for pool in self._in_use:
            pool.retired = True
        while self._idle:
            self._idle.pop().close()

    def resize(self, batch_size: int) -> None:
        """Serve batches of up to ``batch_size`` from now on. What is kept stays."""
        self.stop_workers()
        self.batch_size = batch_size

    def close(self) -> None:
        """End all workers and free the store."""
        self.stop_workers()
        for pool in list(self._in_use):
            pool.close()
        if self.store is not None:
            self.store.close()
            self.store = None

    # ----------------------------------------------------------------- batches

    def host_rows(
        self, batches: Iterable[torch.Tensor], epoch: int, pool: WorkerPool | None, buffer: torch.Tensor
    ) -> Generator[HostRows, None, None]:
        """Each batch in order, valid until the next one is asked for. Without a ``pool`` all samples must be kept.

        ``buffer`` [batch, row_bytes] is filled from a store in host memory.
        """
        plans: deque[_Plan] = deque()
        wanted = self._plan(batches, plans)
        nothing: tuple[torch.Tensor, list[Failure]] = torch.empty(0, self.layout.row_bytes, dtype=torch.uint8), []
        read = pool.stream(wanted, epoch) if pool is not None else (nothing for _ in wanted)
        with contextlib.closing(read):
            for rows, failures in read:
                yield self._assembled(plans.popleft(), rows, failures, buffer)

    @torch.inference_mode(False)  # a pass begun in an evaluation may go on outside of it
    def _plan(self, batches: Iterable[torch.Tensor], plans: deque[_Plan]) -> Iterator[torch.Tensor]:
        """Append a plan for each batch; yields the draws to read for it."""
        underway = torch.zeros(self.bad.samples, dtype=torch.bool)
        for batch in batches:
            store, draws = self.store, self.bad.without_bad(batch)
            wanted = draws
            if store is not None:
                samples = sample_of(draws)
                # A sample that an earlier batch reads is kept when this one is assembled.
                wanted = torch.unique(samples[~(store.has(samples) | underway[samples])])
                underway[wanted] = True
            plans.append((draws, wanted, store))
            yield wanted

    def _assembled(self, plan: _Plan, rows: torch.Tensor, failures: list[Failure], buffer: torch.Tensor) -> HostRows:
        asked, read, store = plan
        if len(rows) != len(read):
            raise UsageError("the loader was closed while this iterator was in use", "Begin another pass over it.")
        self._judge(failures)
        if self.bad.failures:
            good = ~self.bad.bad[sample_of(read)]
            read, rows = read[good], rows[good]
        # A batch that was planned before there was a store goes into the new one.
        if (store := store or self.store) is None:
            return HostRows(read, rows, read[:0])
        draws = self.bad.without_bad(asked)
        if store.on_device:
            return HostRows(draws, rows, sample_of(read), store)
        if len(read):
            try:
                store.write(sample_of(read), rows)
            except CacheFull as full:
                self._on_full(full)
        samples = sample_of(draws)
        out = store.gather(samples, buffer[: len(samples)])
        for place in (~store.has(samples)).nonzero().flatten().tolist():  # the disk is full
            self._judge(self.reader.read(draws[place : place + 1], out[place : place + 1], 0))
        return HostRows(draws, out, samples[:0])

    def _judge(self, failures: list[Failure]) -> None:
        """Note bad or random samples; called on the reading thread, and may set ``store`` to None."""
        for failure in self.bad.note(failures):
            self.notes.say(f"skipped {failure.where()}: {failure.message}", logging.WARNING)
        drawn = next((failure for failure in failures if failure.kind == "random"), None)
        if drawn is not None and not self._found_random:
            self._found_random = True
            self._drop(f"{drawn.where()}: {drawn.message}; nothing is kept, every sample is read on every draw")

    # ----------------------------------------------------------------- opening

    def _make(self, tier: Tier) -> tuple[Store | None, str]:
        shape = self.samples, self.layout.row_bytes
        present = torch.zeros(self.samples, dtype=torch.bool)
        if tier == "vram":
            return Store(torch.empty(shape, dtype=torch.uint8, device=self.device), present, on_device=True), ""
        if tier in ("ram", "pinned"):
            store = Store(shared_bytes(math.prod(shape)).view(shape), present)
            if tier == "pinned":
                pin(store.rows, self.device, store)
            return store, ""
        if tier == "disk":
            named = self._cache_key is not None
            label = f"{type(self.dataset).__name__} {self._cache_key or ''}".strip()
            cache, how = open_cache(self._cache_dir, label, self.layout, self.samples, keep=named)
            if not named:
                how += "; for this run only: cache_key='...' names the data for the next run"
            return cache, f"cache {how}"
        return None, ""

    def _free_bytes(self, *, model_has_run: bool) -> FreeBytes:
        # Without a key the next run cannot use it: only written if asked for.
        cache_dir = None if self.asked == "auto" and self._cache_key is None else self._cache_dir
        return measure_free_bytes(
            self.device, cache_dir, reserve_bytes=self._reserve_bytes, model_has_run=model_has_run
        )

    # ----------------------------------------------------------------- checking and dropping

    def _check(self, epoch: int, changed: str | None) -> None:
        """Drop the store if the data set was changed, or one of a few kept samples differs from it."""
        assert self.store is not None
        self._epochs_served += 1
        if changed is not None:
            self._drop(f"{changed} was changed; what was kept is no longer served", fatal=False)
        elif self._epochs_served == 1 or not (self._declared or self._epochs_served & (self._epochs_served - 1)):
            # It needs a fork, so only once for declared stages, else in epochs 1, 2, 4, 8 ...
            step = max(1, self.samples // COMPARED_SAMPLES)
            picked = ((epoch * 7919 + number * step) % self.samples for number in range(COMPARED_SAMPLES))
            sample = self._first_changed(self.store, picked)
            self._held = HeldState(self.dataset)
            if sample is not None:
                self._drop(f"sample {sample} is not what the data set returns now; what was kept is no longer served")

    def _first_changed(self, store: Store, indices: Iterable[int]) -> int | None:
        """The first of these samples that is kept and that the data set returns differently now, or not at all."""
        wanted = torch.tensor(list(indices))
        kept = wanted[store.has(wanted)]
        if not len(kept):
            return None
        # With another seed, so that random samples differ.
        reader = SampleReader(self.dataset, self.layout, seeded=True, checked=False, seed=~self.reader.seed)
        rows = shared_bytes(len(kept) * self.layout.row_bytes).view(len(kept), -1)
        failures = in_child_process(lambda: reader.read(kept, rows, 0), self.workers, self.dataset)
        failed = {failure.index for failure in failures}
        fresh = zip(kept.tolist(), rows, strict=True)
        return next((i for i, row in fresh if i in failed or not torch.equal(row, store.row(i))), None)

    def _on_full(self, full: CacheFull) -> None:
        """The store ran out of room; see ``_judge``."""
        self._drop(f"{full}; the cache was dropped and training goes on from the source", fatal=False)

    def _drop(self, why: str, *, fatal: bool = True) -> None:
        if fatal and self.asked not in ("auto", "none"):
            raise DataError(why, f"Use residency='auto'. {DECLARE}")
        self.tier, self.undecided = "none", False
        store, self.store = self.store, None
        if isinstance(store, DiskStore):
            store.delete_file()
            self.stop_workers()  # a full disk has its room back when nobody maps the file
        self.notes.say(why, logging.WARNING)
