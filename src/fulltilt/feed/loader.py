"""``feed.loader``: iterates like a DataLoader, and yields batches that are already on the device.

deterministic data set   decoded once while the first epoch trains, then served from its tier
cut transform list       decoded once; the random tail runs in the workers on every draw
random data set          served as it is through the workers, each sample seeded by (seed, epoch, index)
not fixed-shape tensors  torch's DataLoader with tuned settings
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from fulltilt.errors import DataError, UsageError
from fulltilt.feed.augment import Augmentation, as_augmentation
from fulltilt.feed.bad_samples import BadSamples, Policy
from fulltilt.feed.caches import CacheFull
from fulltilt.feed.disk import DiskStore
from fulltilt.feed.inspection import Inspection, inspect
from fulltilt.feed.order import BatchOrder, Order
from fulltilt.feed.places import device_or_default, ranks
from fulltilt.feed.prefetch import DeviceRing, HostBatch
from fulltilt.feed.progress import progress
from fulltilt.feed.readers import Failure, SampleReader, quiet_generators
from fulltilt.feed.residency import Residence
from fulltilt.feed.splitting import SplitReader
from fulltilt.feed.stock import StockLoader
from fulltilt.feed.stores import DeviceStore
from fulltilt.feed.structure import Layout
from fulltilt.feed.supply import Supply
from fulltilt.feed.tiers import Residency, Tier, default_workers
from fulltilt.records import Settings

log = logging.getLogger("fulltilt.feed")

# Steps after which the model's own memory is known: weights, activations, optimizer states (made in the first step).
SETTLED_AFTER_BATCHES = 3
# The part of an epoch that comparing kept samples with the data set may take.
CHECK_SHARE = 0.002


def loader(
    dataset: Any,
    batch_size: int = 1,
    *,
    augment: Augmentation | Iterable[Any] | Callable[[Any], Any] | None = None,
    residency: Residency = "auto",
    shuffle: bool = False,
    sampler: Iterable[int] | None = None,
    drop_last: bool = False,
    seed: int = 0,
    device: torch.device | str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    num_workers: int | None = None,
    collate_fn: Callable[..., Any] | None = None,
    reserve_bytes: int | None = None,
    cache_dir: str | Path | None = None,
    cache_limit_bytes: int | None = None,
    on_bad_sample: Policy = "stop",
    max_bad_share: float = 0.01,
    checks: int = 8,
    settings: Settings | None = None,
) -> FeedLoader:
    """A loader over ``dataset`` whose batches are on ``device`` (default: the current GPU, else the CPU).

    ``residency`` is the tier the decoded samples live on; ``reserve_bytes`` the VRAM to leave for the model (default:
    known after three steps). ``settings`` gives batch size, workers and residency where they are not given here.
    Raises UsageError, DataError, DoesNotFit.
    """
    settings = settings or Settings()
    if settings.residency is not None and residency == "auto":
        residency = settings.residency  # type: ignore[assignment]
    if on_bad_sample not in ("stop", "skip"):
        raise UsageError(f"on_bad_sample is {on_bad_sample!r}", "Choose 'stop' or 'skip'.")
    found_rank, found_world = ranks()
    found = inspect(dataset, checks=checks, policy=on_bad_sample) if collate_fn is None else Inspection(None)
    order = Order(
        samples=len(dataset),
        batch_size=settings.batch_size if settings.batch_size is not None and batch_size == 1 else batch_size,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
        rank=found_rank if rank is None else rank,
        world_size=found_world if world_size is None else world_size,
        sampler=sampler,
    )
    device = device_or_default(device)
    workers = num_workers if num_workers is not None else settings.num_workers
    return FeedLoader(
        dataset,
        order,
        found,
        augment=as_augmentation(augment),
        residence=Residence(dataset, found, residency, device, reserve_bytes, cache_dir, cache_limit_bytes, checks),
        device=device,
        workers=default_workers() if workers is None else workers,
        collate_fn=collate_fn,
        bad=BadSamples(len(dataset), on_bad_sample, max_bad_share),
    )


class FeedLoader:
    """What ``feed.loader`` returns. ``notes`` collects in words what it decided; ``tier`` is where the samples live."""

    def __init__(
        self,
        dataset: Any,
        order: BatchOrder,
        found: Inspection,
        *,
        augment: Augmentation | None,
        residence: Residence,
        device: torch.device,
        workers: int,
        collate_fn: Callable[..., Any] | None,
        bad: BadSamples,
        on_worker_start: Callable[[], None] | None = None,
    ) -> None:
        self.dataset, self.order, self.device = dataset, order, device
        self.notes: list[str] = []
        self.workers = workers
        self._augment = augment
        self._residence = residence
        self._bad = bad
        self._on_worker_start = on_worker_start
        self._next_epoch = 0
        self._epoch = 0
        self._next_batch = 0
        self._resume_at = 0
        self._epochs_served = 0
        self._last_epoch_s = self._check_s = 0.0
        self._found_random: Failure | None = None
        self._stock: StockLoader | None = None
        self._supply: Supply | None = None
        self._ring: DeviceRing | None = None
        self._prefetches = device.type == "cuda"  # on a CPU there is nothing to copy to
        if found.layout is None:
            self._stock = StockLoader(dataset, order, collate_fn, workers, device)
            why = found.unstorable_because or "a collate_fn was given"
            self._note(f"served by a stock DataLoader with {workers} workers: {why}")
            residence.refuse_if_asked(why)
        else:
            self._layout = found.layout
            self._supply = self._make_supply(found, found.layout)

    # ----------------------------------------------------------------- like a DataLoader

    @property
    def tier(self) -> Tier:
        """Where the decoded samples live; ``none`` until that is decided."""
        return self._residence.tier

    @property
    def batch_size(self) -> int:
        """Samples in a full batch on this rank."""
        return self.order.batch_size

    def __len__(self) -> int:
        return self.order.batches_per_epoch()

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next iteration draws. Without it each iteration draws the epoch after the last one."""
        self.begin_at(epoch, 0)

    def begin_at(self, epoch: int, batch: int) -> None:
        """Let the next iteration begin with batch number ``batch`` of ``epoch``."""
        self._next_epoch, self._resume_at = epoch, batch

    def regroup(self, order: BatchOrder) -> None:
        """Draw the same samples in the batches of another order from the next iteration on. What is kept stays."""
        if order.batch_size != self.order.batch_size and self._supply is not None:
            self._supply.resize(order.batch_size)
            self._ring = None
        self.order = order

    def state_dict(self) -> dict[str, int]:
        """Where the iteration stands: after a load, the next batch is the one that would have come now."""
        return {"epoch": self._epoch, "batch": self._next_batch, "seed": self.order.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from ``state``. Raises UsageError if it belongs to another seed."""
        if state.get("seed", self.order.seed) != self.order.seed:
            raise UsageError(f"the saved loader had seed {state['seed']}, this one has {self.order.seed}")
        self._epoch = self._next_epoch = state["epoch"]
        self._next_batch = self._resume_at = state["batch"]

    def __iter__(self) -> Iterator[Any]:
        epoch, start = self._next_epoch, self._resume_at
        self._next_epoch, self._resume_at = epoch + 1, 0
        self._epoch, self._next_batch = epoch, start
        for batch, indices in self._stock.batches(epoch, start) if self._stock else self._batches(epoch, start):
            # Counted before the batch is handed out: a checkpoint taken after its step must not see it again.
            self._next_batch += 1
            yield batch if self._augment is None else self._augment(batch, self.order.seed, epoch, indices)
        self._epoch, self._next_batch = epoch + 1, 0

    def fill(self, *, shown: bool | None = None) -> None:
        """Decode everything now, with a progress bar, instead of while the first epoch trains."""
        supply = self._supply
        if supply is None or not self._residence.wanted:
            return
        self._settle(model_has_run=False)
        everything = [*torch.split(torch.arange(self._residence.samples), self.batch_size)]
        if supply.store is not None and supply.missing(everything):
            batches = self._device_batches(supply, everything, 0)
            for _ in progress(batches, len(everything), f"Decoding into {self.tier}", shown=shown):
                pass
        self._end_epoch(supply)

    def close(self) -> None:
        """End the workers and give all memory back. A complete disk cache stays for the next run."""
        if self._supply is not None:
            self._supply.close()
        self._ring = None

    def __enter__(self) -> FeedLoader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ----------------------------------------------------------------- one epoch

    def _batches(self, epoch: int, start: int) -> Iterator[tuple[Any, torch.Tensor]]:
        supply = self._supply
        assert supply is not None
        self._serve_random_if_found(supply)
        if self._residence.wanted and not self._residence.decided:
            if not self._residence.waits_for_model:
                self._settle(model_has_run=False)
        elif supply.store is not None:
            self._check(supply, epoch)
        began_s = time.monotonic()
        batches = self.order.batches(epoch)[start:]
        leaves_of_batches = (
            self._resident(supply.store, batches)
            if isinstance(supply.store, DeviceStore) and not supply.missing(batches)
            else self._device_batches(supply, batches, epoch)
        )
        for number, (leaves, indices) in enumerate(leaves_of_batches, start=1):
            if number == SETTLED_AFTER_BATCHES + 1 and self._residence.wanted and not self._residence.decided:
                self._settle(model_has_run=True)
            yield self._layout.build(leaves), indices
        self._last_epoch_s = time.monotonic() - began_s
        self._end_epoch(supply)

    def _resident(
        self, store: DeviceStore, batches: list[torch.Tensor]
    ) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
        """Batches of a complete device store: one upload of indices for the epoch, then one gather a tensor."""
        batches = [self._bad.without_bad(batch) for batch in batches]
        if batches:
            every = torch.cat(batches).to(self.device)
            for indices in torch.split(every, [len(batch) for batch in batches]):
                yield store.gather(indices), indices

    def _device_batches(
        self, supply: Supply, batches: list[torch.Tensor], epoch: int
    ) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
        host = supply.host_batches(batches, epoch)
        if not self._prefetches:
            try:
                for batch in host:
                    leaves = self._take(batch, batch.rows, batch.indices, batch.row_indices)
                    batch.release()
                    yield leaves, batch.indices
            finally:
                host.close()
            return
        if supply.missing(batches):
            supply.start_workers()  # forked here, on the main thread, and not in the feeding thread
        if self._ring is None:
            with torch.inference_mode(False):  # made in an evaluation, it has to be of use to the feeding thread
                self._ring = DeviceRing(self.batch_size, self._layout.row_bytes, self.device)
        stream = self._ring.stream(host)
        try:
            for arrived in stream:
                leaves = self._take(arrived.host, arrived.rows, arrived.indices, arrived.row_indices)
                arrived.done()
                yield leaves, arrived.indices
        finally:
            stream.close()

    def _take(
        self, batch: HostBatch, rows: torch.Tensor, indices: torch.Tensor, row_indices: torch.Tensor
    ) -> list[torch.Tensor]:
        """The leaves of a batch as tensors of the caller's own; rows that a device store lacks go into it first."""
        store = batch.store
        if isinstance(store, DeviceStore):
            if len(row_indices):
                store.write(row_indices, rows)
                store.present[batch.row_indices] = True
            return store.gather(indices)
        return [leaf.clone(memory_format=torch.contiguous_format) for leaf in self._layout.split(rows)]

    def _end_epoch(self, supply: Supply) -> None:
        if self._residence.wanted and not self._residence.decided:
            self._settle(model_has_run=True)  # an epoch of three batches or fewer
        if supply.store is None:
            return
        for note in self._residence.finish(supply):
            self._note(note)

    # ----------------------------------------------------------------- where samples live

    def _make_supply(self, found: Inspection, layout: Layout) -> Supply:
        reader: Any
        if found.split is not None and self._residence.wanted_for_split:
            store, notes = self._residence.open_for_split()
            if store is None:
                reader = SampleReader(self.dataset, layout, random=True, seed=self.order.seed)
            else:
                assert found.kept is not None
                reader = SplitReader(self.dataset, found.split, found.kept, layout, store, self.order.seed)
                once, each = found.split.names()
                first = ", ".join(["reading", *once])
                notes.append(f"done once: {first}; done on every draw, in the workers: {', '.join(each)}")
        else:
            reader = SampleReader(self.dataset, layout, random=found.random_because is not None, seed=self.order.seed)
            notes = [f"served as it is: {found.random_because}"] if found.random_because is not None else []
            if found.random_because is not None:
                self._residence.refuse_if_asked(found.random_because)
        for note in notes:
            self._note(note)
        return Supply(
            reader,
            layout,
            self.batch_size,
            workers=self.workers,
            device=self.device,
            bad=self._bad,
            on_random=self._on_random,
            on_full=self._on_full,
            on_bad=lambda failure: self._warn(f"skipped {failure.where()}: {failure.message}"),
            on_worker_start=self._on_worker_start,
        )

    @torch.inference_mode(False)  # what is kept outlives the evaluation that it may be made in
    def _settle(self, *, model_has_run: bool) -> None:
        """Decide the tier, now that the model's own memory is known, and begin to keep what is read."""
        assert self._supply is not None
        self._supply.store, notes = self._residence.open(model_has_run=model_has_run)
        for note in notes:
            self._note(note)

    def _check(self, supply: Supply, epoch: int) -> None:
        """Two kept samples against the data set itself, other ones each time.

        At the start of every epoch, unless that would take a noticeable part of it: then ever more rarely.
        """
        assert supply.store is not None
        self._epochs_served += 1
        rarely = self._epochs_served & (self._epochs_served - 1) == 0
        if self._check_s > CHECK_SHARE * self._last_epoch_s and not rarely:
            return
        began_s = time.monotonic()
        with quiet_generators(self.dataset):
            changed = self._residence.changed_sample(supply.store, epoch)
        self._check_s = time.monotonic() - began_s
        if changed is not None:
            self._drop(f"sample {changed} is not what the data set returns now; what was kept is no longer served")

    def _on_full(self, full: CacheFull) -> None:
        self._drop(f"{full}; the cache was dropped and training goes on from the source", fatal=False)

    def _on_random(self, failure: Failure) -> None:
        if self._found_random is None:
            self._found_random = failure
            self._drop(f"{failure.where()}: {failure.message}; nothing is kept, every sample is drawn anew")

    def _drop(self, why: str, *, fatal: bool = True) -> None:
        if fatal and self._residence.asked not in ("auto", "none"):
            raise DataError(why, "Use residency='auto', or take the randomness out of the data set (augment=...).")
        self._residence.drop()
        if self._supply is not None:
            if isinstance(self._supply.store, DiskStore):
                self._supply.store.delete_files()
            self._supply.store = None
        self._warn(why)

    def _serve_random_if_found(self, supply: Supply) -> None:
        """From the next epoch on the workers seed each sample, as for a data set known to be random."""
        if self._found_random is not None and isinstance(supply.reader, SampleReader) and not supply.reader.random:
            supply.stop_workers()
            supply.reader = SampleReader(self.dataset, self._layout, random=True, seed=self.order.seed)

    def _note(self, text: str) -> None:
        self.notes.append(text)
        log.info(text)

    def _warn(self, text: str) -> None:
        self.notes.append(text)
        log.warning(text)
