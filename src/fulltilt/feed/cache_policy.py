"""What is kept, on which tier and until when: the tier is chosen, what it serves is checked, and given up if wrong."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fulltilt.errors import DataError, FulltiltError, UsageError
from fulltilt.feed.dataset_check import DECLARE, AttributeSnapshot, Inspection
from fulltilt.feed.disk_cache import CacheFull, CacheKey, DiskStore, default_cache_dir, default_limit_bytes, open_cache
from fulltilt.feed.epoch_order import spread
from fulltilt.feed.random_state import Generators
from fulltilt.feed.row_reader import RowReader
from fulltilt.feed.sample_layout import Layout
from fulltilt.feed.sample_reader import BadSamples, Failure, Reader, SampleReader
from fulltilt.feed.storage import DeviceStore, HostStore, pin, shared_bytes
from fulltilt.feed.tiers import Choice, Residency, Room, Tier, choose_tier, measure_room
from fulltilt.feed.worker_pool import in_child_process

# Kept samples that are compared with the data set itself at the start of every epoch after the first.
CHECKS_PER_EPOCH = 2


class Residence:
    """Where the samples of ``dataset`` are to live, and whether they do yet."""

    def __init__(
        self,
        dataset: Any,
        found: Inspection,
        asked: Residency,
        device: torch.device,
        reserve_bytes: int | None,
        cache_dir: str | Path | None,
        cache_limit_bytes: int | None,
        checks: int,
        cache_key: str | None = None,
    ) -> None:
        self.dataset, self.found, self.asked, self.device = dataset, found, asked, device
        self.samples = len(dataset)
        self.tier: Tier = "none"
        self.decided = False
        self._reserve_bytes = reserve_bytes
        self._cache_key = cache_key if cache_key is not None else getattr(dataset, "cache_key", None)
        self._cache_dir = Path(cache_dir) if cache_dir is not None else default_cache_dir()
        self._cache_limit_bytes = (
            default_limit_bytes(self._cache_dir) if cache_limit_bytes is None else cache_limit_bytes
        )
        self.workers = 0  # how many run the data set
        self._checks = checks
        self._told_complete = False
        self._dropped = False
        # An unknown tier or one that this machine lacks is the user's mistake: say so now, not in mid-epoch.
        choose_tier(0, self._room(model_has_run=True), asked)

    def __getstate__(self) -> dict[str, Any]:
        # A copy has kept nothing yet.
        return {**vars(self), "tier": "none", "decided": False, "_told_complete": False}

    @property
    def wanted(self) -> bool:
        """Whether whole samples are to be kept: the data set is deterministic and nobody forbade it."""
        deterministic = self.found.layout is not None and self.found.random_because is None
        return deterministic and self.asked != "none" and not self._dropped

    @property
    def complete(self) -> bool:
        """Whether every sample is kept: nothing is read from the data set any more."""
        return self._told_complete

    @property
    def waits_for_model(self) -> bool:
        """Whether the choice waits until the model has trained a few steps and shown what it needs."""
        return self.asked == "auto" and self.device.type == "cuda" and self._reserve_bytes is None

    def open(self, *, model_has_run: bool) -> tuple[DeviceStore | HostStore | None, list[str]]:
        """The store on the chosen tier (None for ``none``), and what to tell about it."""
        assert self.found.layout is not None
        store, notes = self._open(self.found.layout, model_has_run=model_has_run)
        if isinstance(store, DiskStore):
            changed = self._first_changed(store, spread(self.samples, self._checks))
            if changed is not None:
                refused = f"the cache was refused: its sample {changed} is not what the data set returns"
                if not store.discard():  # not ours to delete
                    self.tier = "none"
                    return None, [*notes, f"{refused}; training goes on from the source"]
                notes.append(refused)
                store, more = self._open(self.found.layout, model_has_run=model_has_run)
                notes += more
        return store, notes

    def finish(self, rows: RowReader) -> list[str]:
        """After an epoch: once every sample is kept, end the workers and make a disk cache permanent."""
        store = rows.store
        if store is None or self._told_complete:
            return []
        kept = store.has(torch.arange(self.samples)) | rows.bad.bad
        if not bool(kept.all()):
            return []
        rows.stop_workers()
        self._told_complete = True
        if isinstance(store, DiskStore) and not rows.bad.failures:
            store.finish()
        return [f"all {self.samples} samples are kept ({self.tier})"]

    def changed_sample(self, store: DeviceStore | HostStore, epoch: int) -> int | None:
        """A kept sample that the data set no longer returns, among a few that differ from epoch to epoch."""
        step = max(1, self.samples // CHECKS_PER_EPOCH)
        picked = ((epoch * 7919 + number * step) % self.samples for number in range(CHECKS_PER_EPOCH))
        return self._first_changed(store, picked)

    def drop(self) -> None:
        """Nothing is kept from now on."""
        self.tier, self.decided, self._dropped = "none", True, True

    def refuse_if_asked(self, why: str) -> None:
        """Raise UsageError if a tier was asked for by name that ``why`` rules out."""
        if self.asked not in ("auto", "none"):
            remedy = f" {DECLARE}" if self.found.random_because is not None else ""
            raise UsageError(f"the data set cannot be kept in {self.asked}: {why}", f"Use residency='auto'.{remedy}")

    # ----------------------------------------------------------------- opening

    def _open(self, layout: Layout, *, model_has_run: bool) -> tuple[DeviceStore | HostStore | None, list[str]]:
        need = self.samples * layout.row_bytes
        choice = choose_tier(need, self._room(model_has_run=model_has_run), self.asked)
        self.decided = True
        try:
            store, how = self._make(choice.tier, layout)
        except CacheFull as full:
            choice, store, how = Choice("none", str(full)), None, "training goes on from the source"
        except FulltiltError as refused:  # by a folder, a disk or the system; nobody asked for it by name
            if self.asked != "auto":
                raise
            choice, store, how = Choice("none", refused.what), None, "training goes on from the source"
        self.tier = choice.tier
        return store, [f"residency {choice.tier}: {choice.reason}" + (f" ({how})" if how else "")]

    def _make(self, tier: Tier, layout: Layout) -> tuple[DeviceStore | HostStore | None, str]:
        if tier == "vram":
            return DeviceStore(layout, self.samples, self.device), ""
        if tier in ("ram", "pinned"):
            rows = shared_bytes(self.samples * layout.row_bytes).view(self.samples, layout.row_bytes)
            present = shared_bytes(self.samples).view(torch.bool)
            store = HostStore(rows, present)
            store.pinned = tier == "pinned" and pin(rows, self.device, store)
            return store, ""
        if tier == "disk":
            named = self._cache_key is not None
            key = CacheKey(f"{type(self.dataset).__name__} {self._cache_key or ''}".strip(), {}, reusable=named)
            store, how = open_cache(self._cache_dir, key, layout, self.samples, limit_bytes=self._cache_limit_bytes)
            if not named:
                how += "; for this run only: cache_key='...' names the data for the next run"
            return store, f"cache {how}"
        return None, ""

    def _room(self, *, model_has_run: bool) -> Room:
        room = measure_room(
            self.device,
            self._cache_dir,
            reserve_bytes=self._reserve_bytes,
            model_has_run=model_has_run,
            cache_limit_bytes=self._cache_limit_bytes,
        )
        # Without a key the next run could not tell what is in it: not worth writing, unless asked for.
        return replace(room, disk_bytes=None) if self.asked == "auto" and self._cache_key is None else room

    # ----------------------------------------------------------------- checking

    def _first_changed(self, store: DeviceStore | HostStore, indices: Iterable[int]) -> int | None:
        kept = [index for index in indices if bool(store.has(torch.tensor([index])).all())]
        if not kept:
            return None
        fresh = in_child_process(lambda: self._drawn(kept), self.workers, self.dataset)
        return next(
            (index for index, row in zip(kept, fresh, strict=True) if not self._is_kept(store, index, row)), None
        )

    def _drawn(self, indices: list[int]) -> list[torch.Tensor | None]:
        """These samples as rows, fetched now; None for one that is not to be had any more."""
        layout = self.found.layout
        assert layout is not None
        rows: list[torch.Tensor | None] = []
        generators = Generators(self.dataset)
        with generators.untouched():
            for index in indices:
                generators.seed(index + 1)
                row = torch.zeros(1, layout.row_bytes, dtype=torch.uint8)
                try:
                    layout.pack(self.dataset[index], row[0])
                except Exception:
                    rows.append(None)
                else:
                    rows.append(row)
        return rows

    def _is_kept(self, store: DeviceStore | HostStore, index: int, fresh: torch.Tensor | None) -> bool:
        layout = self.found.layout
        assert layout is not None
        if fresh is None:
            return False  # kept once, not to be had any more: the data set has changed
        if isinstance(store, DeviceStore):
            kept = [leaf.cpu() for leaf in store.gather(torch.tensor([index], device=self.device))]
        else:
            kept = layout.split(store.rows[index : index + 1])
        return all(_same_bits(left, right) for left, right in zip(kept, layout.split(fresh), strict=True))


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equality to the bit: NaN equals itself."""
    return torch.equal(
        *(leaf.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8) for leaf in (left, right))
    )


log = logging.getLogger("fulltilt.feed")

# Steps after which the model's own memory is known: weights, activations, optimizer states (made in the first step).
SETTLED_AFTER_BATCHES = 3
# The part of an epoch that comparing kept samples with the data set may take.
CHECK_SHARE = 0.002


class Notes(list[str]):
    """What was decided, in words; each is logged as well."""

    def say(self, text: str) -> None:
        """Something worth knowing."""
        self.append(text)
        log.info(text)

    def warn(self, text: str) -> None:
        """Something worth seeing."""
        self.append(text)
        log.warning(text)

    def skipped(self, failure: Failure) -> None:
        """A sample was left out."""
        self.warn(f"skipped {failure.where()}: {failure.message}")


class CachePolicy:
    """Reads samples through its ``rows`` and keeps them in the store that the residence opens."""

    def __init__(
        self,
        residence: Residence,
        layout: Layout,
        batch_size: int,
        *,
        seed: int,
        workers: int,
        bad: BadSamples,
        notes: Notes,
        on_worker_start: Callable[[], None] | None,
    ) -> None:
        self.residence, self.layout, self.notes = residence, layout, notes
        self._seed = seed
        self._epochs_served = 0
        self._epoch_began_s = self._last_epoch_s = self._check_s = 0.0
        self._found_random: Failure | None = None
        self._settings: AttributeSnapshot | None = None  # the data set's when it was last read from
        residence.workers = workers
        self.rows = RowReader(
            self._reader(),
            layout,
            batch_size,
            workers=workers,
            device=residence.device,
            bad=bad,
            on_random=self._on_random,
            on_full=self._on_full,
            on_bad=notes.skipped,
            on_worker_start=on_worker_start,
        )

    @property
    def _undecided(self) -> bool:
        return self.residence.wanted and not self.residence.decided

    def begin_epoch(self, epoch: int) -> None:
        """Choose the tier where that can be done already; check what is kept."""
        self._serve_random_if_found()
        now = AttributeSnapshot(self.residence.dataset)
        changed = None if self._settings is None else self._settings.changed(now)
        if changed is not None:
            self.rows.stop_workers()  # they have the data set as it was when they were forked
        self._settings = now
        if self._undecided:
            if not self.residence.waits_for_model:
                self.settle(model_has_run=False)
            else:
                self.rows.puts_aside = True
        elif self.rows.store is not None:
            self._check(epoch, changed)
        self._epoch_began_s = time.monotonic()

    def batches_trained(self, number: int) -> None:
        """So many batches of the epoch have been trained on: the model may have shown what it needs."""
        if number == SETTLED_AFTER_BATCHES and self._undecided:
            self.settle(model_has_run=True)

    def end_epoch(self) -> None:
        """Make a complete store permanent."""
        self._last_epoch_s = time.monotonic() - self._epoch_began_s
        if self._undecided:
            self.settle(model_has_run=True)  # an epoch of three batches or fewer
        if self.rows.store is not None:
            try:
                for note in self.residence.finish(self.rows):
                    self.notes.say(note)
            except CacheFull as full:  # some disks tell only when what was written has to be there
                self._on_full(full)

    def leave_epoch(self) -> None:
        """The epoch is over, or was left early: reading in this process may itself have changed the data set."""
        if not self.rows.workers:
            self._settings = AttributeSnapshot(self.residence.dataset)

    @torch.inference_mode(False)  # what is kept outlives the evaluation that it may be made in
    def settle(self, *, model_has_run: bool) -> None:
        """Decide the tier, now that the model's own memory is known, and begin to keep what is read."""
        store, notes = self.residence.open(model_has_run=model_has_run)
        self.rows.open_store(store)
        for note in notes:
            self.notes.say(note)

    # ----------------------------------------------------------------- reading

    def _reader(self) -> Reader:
        residence, layout = self.residence, self.layout
        random = residence.found.random_because
        if random is not None:
            self.notes.say(f"read by {residence.workers} workers on every draw: {random}. {DECLARE}")
            residence.refuse_if_asked(random)
        checked = residence.wanted and not residence.found.declared
        return SampleReader(residence.dataset, layout, seeded=random is not None, checked=checked, seed=self._seed)

    def _serve_random_if_found(self) -> None:
        """From the next epoch on the workers seed each sample, as for a data set known to be random."""
        reader = self.rows.reader
        if self._found_random is not None and isinstance(reader, SampleReader) and not reader.seeded:
            self.rows.stop_workers()
            reader.seeded = True

    # ----------------------------------------------------------------- checking and giving up

    def _check(self, epoch: int, changed: str | None) -> None:
        """Whether the data set was changed; and two kept samples against it, other ones each time.

        At the start of every epoch, unless that would take a noticeable part of it: then ever more rarely.
        """
        assert self.rows.store is not None
        self._epochs_served += 1
        if changed is not None:
            self._drop(
                f"the data set's attribute {changed} was changed; what was kept is no longer served", fatal=False
            )
            return
        rarely = self._epochs_served & (self._epochs_served - 1) == 0
        if self._check_s > CHECK_SHARE * self._last_epoch_s and not rarely:
            return
        began_s = time.monotonic()
        sample = self.residence.changed_sample(self.rows.store, epoch)
        self._check_s = time.monotonic() - began_s
        self._settings = AttributeSnapshot(self.residence.dataset)
        if sample is not None:
            self._drop(f"sample {sample} is not what the data set returns now; what was kept is no longer served")

    def _on_full(self, full: CacheFull) -> None:
        self._drop(f"{full}; the cache was dropped and training goes on from the source", fatal=False)

    def _on_random(self, failure: Failure) -> None:
        if self._found_random is None:
            self._found_random = failure
            self._drop(f"{failure.where()}: {failure.message}; nothing is kept, every sample is drawn anew")

    def _drop(self, why: str, *, fatal: bool = True) -> None:
        if fatal and self.residence.asked not in ("auto", "none"):
            raise DataError(why, f"Use residency='auto'. {DECLARE}")
        self.residence.drop()
        store: Any = self.rows.store
        if isinstance(store, DiskStore):
            store.delete_files()
        self.rows.open_store(None)
        self.notes.warn(why)
