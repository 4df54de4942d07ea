"""What is kept and until when: the tier is chosen, what it serves is checked, and given up when it is not true."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from fulltilt.errors import DataError
from fulltilt.feed.bad_samples import BadSamples
from fulltilt.feed.dataset_check import DECLARE, AttributeSnapshot
from fulltilt.feed.disk_cache import CacheFull, DiskStore
from fulltilt.feed.readers import Failure, Reader, SampleReader
from fulltilt.feed.residency import Residence
from fulltilt.feed.structure import Layout
from fulltilt.feed.supply import Supply

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


class Keeping:
    """Reads samples through its ``supply`` and keeps them in the store that the residence opens."""

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
        self.supply = Supply(
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
            self.supply.stop_workers()  # they have the data set as it was when they were forked
        self._settings = now
        if self._undecided:
            if not self.residence.waits_for_model:
                self.settle(model_has_run=False)
            else:
                self.supply.puts_aside = True
        elif self.supply.store is not None:
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
        if self.supply.store is not None:
            try:
                for note in self.residence.finish(self.supply):
                    self.notes.say(note)
            except CacheFull as full:  # some disks tell only when what was written has to be there
                self._on_full(full)

    def leave_epoch(self) -> None:
        """The epoch is over, or was left early: reading in this process may itself have changed the data set."""
        if not self.supply.workers:
            self._settings = AttributeSnapshot(self.residence.dataset)

    @torch.inference_mode(False)  # what is kept outlives the evaluation that it may be made in
    def settle(self, *, model_has_run: bool) -> None:
        """Decide the tier, now that the model's own memory is known, and begin to keep what is read."""
        store, notes = self.residence.open(model_has_run=model_has_run)
        self.supply.open_store(store)
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
        reader = self.supply.reader
        if self._found_random is not None and isinstance(reader, SampleReader) and not reader.seeded:
            self.supply.stop_workers()
            reader.seeded = True

    # ----------------------------------------------------------------- checking and giving up

    def _check(self, epoch: int, changed: str | None) -> None:
        """Whether the data set was changed; and two kept samples against it, other ones each time.

        At the start of every epoch, unless that would take a noticeable part of it: then ever more rarely.
        """
        assert self.supply.store is not None
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
        sample = self.residence.changed_sample(self.supply.store, epoch)
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
        store: Any = self.supply.store
        if isinstance(store, DiskStore):
            store.delete_files()
        self.supply.open_store(None)
        self.notes.warn(why)
