"""One data set's home: opens the store on the tier chosen for it, checks it, completes it and gives it up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fulltilt.errors import FulltiltError, UsageError
from fulltilt.feed.dataset_check import DECLARE, Inspection
from fulltilt.feed.disk_cache import CacheFull, CacheKey, DiskStore, default_cache_dir, default_limit_bytes, open_cache
from fulltilt.feed.generators import Generators
from fulltilt.feed.memory import pin, shared_bytes
from fulltilt.feed.order import spread
from fulltilt.feed.stores import DeviceStore, HostStore
from fulltilt.feed.structure import Layout
from fulltilt.feed.supply import Supply
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

    def finish(self, supply: Supply) -> list[str]:
        """After an epoch: once every sample is kept, end the workers and make a disk cache permanent."""
        store = supply.store
        if store is None or self._told_complete:
            return []
        kept = store.has(torch.arange(self.samples)) | supply.bad.bad
        if not bool(kept.all()):
            return []
        supply.stop_workers()
        self._told_complete = True
        if isinstance(store, DiskStore) and not supply.bad.failures:
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
