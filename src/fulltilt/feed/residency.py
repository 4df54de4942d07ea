"""One data set's home: opens the store on the tier chosen for it, checks it, completes it and gives it up."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from fulltilt.errors import FulltiltError, UsageError
from fulltilt.feed import entropy
from fulltilt.feed.apart import apart
from fulltilt.feed.disk_cache import CacheFull, DiskStore, default_cache_dir, default_limit_bytes, open_cache
from fulltilt.feed.fingerprint import fingerprint
from fulltilt.feed.forked import as_a_worker
from fulltilt.feed.generators import Generators
from fulltilt.feed.inspection import Inspection
from fulltilt.feed.memory import pin, shared_bytes
from fulltilt.feed.order import spread
from fulltilt.feed.randomness import goes_by
from fulltilt.feed.stores import DeviceStore, HostStore
from fulltilt.feed.structure import Layout
from fulltilt.feed.supply import Supply
from fulltilt.feed.tiers import Choice, Residency, Tier, choose_tier, measure_room
from fulltilt.feed.untouched import untouched

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
    ) -> None:
        self.dataset, self.found, self.asked, self.device = dataset, found, asked, device
        self.samples = len(dataset)
        self.tier: Tier = "none"
        self.decided = False
        self._reserve_bytes = reserve_bytes
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
    def wanted_for_split(self) -> bool:
        """Whether the first part of a cut transform list is to be kept."""
        return self.found.split is not None and self.asked != "none"

    @property
    def waits_for_model(self) -> bool:
        """Whether the choice waits until the model has trained a few steps and shown what it needs."""
        return self.asked == "auto" and self.device.type == "cuda" and self._reserve_bytes is None

    def open(self, *, model_has_run: bool) -> tuple[DeviceStore | HostStore | None, list[str]]:
        """The store on the chosen tier (None for ``none``), and what to tell about it."""
        assert self.found.layout is not None
        store, notes = self._open(self.found.layout, model_has_run=model_has_run, on_host=False)
        if isinstance(store, DiskStore):
            changed = self._first_changed(store, spread(self.samples, self._checks), self.workers)
            if changed is not None:
                refused = f"the cache was refused: its sample {changed} is not what the data set returns"
                if not store.discard():  # not ours to delete
                    self.tier = "none"
                    return None, [*notes, f"{refused}; training goes on from the source"]
                notes.append(refused)
                store, more = self._open(self.found.layout, model_has_run=model_has_run, on_host=False)
                notes += more
        return store, notes

    def open_for_split(self) -> tuple[HostStore | None, list[str]]:
        """A store that worker processes share, for the first part of a cut transform list."""
        assert self.found.kept is not None
        if self.asked == "disk":
            # Workers write to it at once and may be many; what a disk cache saves a later run is the decode only.
            raise UsageError(
                "a data set with random transforms cannot be kept on disk", "Use residency='auto' or 'ram'."
            )
        store, notes = self._open(self.found.kept, model_has_run=True, on_host=True)
        assert not isinstance(store, DeviceStore)
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

    def changed_sample(self, store: DeviceStore | HostStore, epoch: int, *, many: bool) -> int | None:
        """A kept sample that the data set no longer returns, among a few that differ from epoch to epoch."""
        checks = max(CHECKS_PER_EPOCH, self._checks) if many else CHECKS_PER_EPOCH
        step = max(1, self.samples // checks)
        picked = ((epoch * 7919 + number * step) % self.samples for number in range(checks))
        # In this process: the workers have started long ago, and a fork in every epoch would cost more than it shows.
        return self._first_changed(store, picked, workers=0)

    def goes_by(self, names: set[str]) -> str | None:
        """The one of these settings that a sample is made by, as far as its code tells."""
        if not names:
            return None
        generators = Generators(self.dataset)
        with as_a_worker(self.workers, self.dataset), untouched(self.dataset, generators):
            for index in spread(self.samples, CHECKS_PER_EPOCH):
                try:
                    return goes_by(lambda index=index: self.dataset[index], names, generators)  # type: ignore[misc]
                except Exception:  # a bad sample tells nothing
                    continue
        return min(names)

    def drop(self) -> None:
        """Nothing is kept from now on."""
        self.tier, self.decided, self._dropped = "none", True, True

    def refuse_if_asked(self, why: str) -> None:
        """Raise UsageError if a tier was asked for by name that ``why`` rules out."""
        if self.asked not in ("auto", "none"):
            random = self.found.random_because is not None
            remedy = ", or take the random part out of the data set and give it as augment=..." if random else "."
            raise UsageError(f"the data set cannot be kept in {self.asked}: {why}", f"Use residency='auto'{remedy}")

    # ----------------------------------------------------------------- opening

    def _open(
        self, layout: Layout, *, model_has_run: bool, on_host: bool
    ) -> tuple[DeviceStore | HostStore | None, list[str]]:
        need = self.samples * layout.row_bytes
        room = self._room(model_has_run=model_has_run)
        choice = choose_tier(need, room, self.asked, on_host=on_host)
        if on_host and choice.tier == "disk":
            choice = Choice("none", f"{choice.reason}; workers cannot share the disk tier")
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
            made_from = fingerprint(self.dataset, opened=self.found.opened)
            store, how = open_cache(
                self._cache_dir, made_from, layout, self.samples, limit_bytes=self._cache_limit_bytes
            )
            if not made_from.reusable:
                how += f"; for this run only, because {made_from.unreadable[0]} cannot be fingerprinted"
            return store, f"cache {how}"
        return None, ""

    def _room(self, *, model_has_run: bool) -> Any:
        return measure_room(
            self.device,
            self._cache_dir,
            reserve_bytes=self._reserve_bytes,
            model_has_run=model_has_run,
            cache_limit_bytes=self._cache_limit_bytes,
        )

    # ----------------------------------------------------------------- checking

    def _first_changed(self, store: DeviceStore | HostStore, indices: Iterable[int], workers: int) -> int | None:
        kept = [index for index in indices if bool(store.has(torch.tensor([index])).all())]
        if not kept:
            return None
        fresh = apart(lambda: self._drawn(kept), workers, self.dataset)
        return next(
            (index for index, row in zip(kept, fresh, strict=True) if not self._is_kept(store, index, row)), None
        )

    def _drawn(self, indices: list[int]) -> list[torch.Tensor | None]:
        """These samples as rows, drawn now; None for one that is not to be had any more, or is drawn at random now."""
        layout = self.found.layout
        assert layout is not None
        rows: list[torch.Tensor | None] = []
        generators = Generators(self.dataset)
        with as_a_worker(self.workers, self.dataset), untouched(self.dataset, generators), entropy.listened():
            for index in indices:
                row = torch.zeros(1, layout.row_bytes, dtype=torch.uint8)
                before = generators.mark()
                try:
                    layout.pack(self.dataset[index], row[0])
                except Exception:
                    rows.append(None)
                else:
                    rows.append(row if before == generators.mark() else None)
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
