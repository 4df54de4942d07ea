"""The rows of every batch: from the store where they are kept, from the workers where they are not yet."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from fulltilt.feed.disk_cache import CacheFull
from fulltilt.feed.epoch_order import sample_of
from fulltilt.feed.sample_layout import Layout
from fulltilt.feed.sample_reader import BadSamples, Failure, Reader
from fulltilt.feed.storage import Buffer, DeviceStore, HostStore, Staging
from fulltilt.feed.worker_pool import Slot, WorkerPool

# Batches read ahead by the workers: enough to bridge a slow sample or a validation pause, few enough to stay small.
SLOTS = 4
# Above this, two batches have to do: one being read while the other is copied.
SLOT_BYTES = 2 * 1024**3
# Batches put aside while it is not known yet whether and where there is room: those that the model is watched with, and
# those that are on their way to the device meanwhile. Fewer where they are large.
PUT_ASIDE = 8
PUT_ASIDE_BYTES = 2 * 1024**3
# Rows at least this long are copied to the device one by one from pinned memory: a copy call then costs less than
# moving the row to a staging buffer first.
DIRECT_ROW_BYTES = 64 * 1024


_Read = tuple[WorkerPool, Slot]  # a slot with rows, and the pool to give it back to


@dataclass
class _Plan:
    draws: torch.Tensor
    wanted: torch.Tensor
    store: DeviceStore | HostStore | None


@dataclass
class HostBatch:
    """A batch, or the part of it that is not on the device yet, in host memory.

    ``release`` is called when ``rows`` was copied away. ``store`` is handed through to the consumer. ``scattered``:
    ``rows`` is a whole pinned store, and the batch is its rows ``row_indices``.
    """

    indices: torch.Tensor
    rows: torch.Tensor
    row_indices: torch.Tensor
    release: Callable[[], None] = field(default=lambda: None)
    store: Any = None
    scattered: bool = False


class RowReader:
    """Serves batches of rows in order, and keeps what was read in ``store`` (which may come, go and be None).

    ``on_random`` and ``on_full`` are told, on whatever thread reads, that a sample draws random numbers or that the
    store ran out of room; both may set ``store`` to None.
    """

    def __init__(
        self,
        reader: Reader,
        layout: Layout,
        batch_size: int,
        *,
        workers: int,
        device: torch.device,
        bad: BadSamples,
        on_random: Callable[[Failure], None],
        on_full: Callable[[CacheFull], None],
        on_bad: Callable[[Failure], None],
        on_worker_start: Callable[[], None] | None = None,
    ) -> None:
        self.reader = reader
        self.layout = layout
        self.batch_size = batch_size
        self.workers = workers
        self.device = device
        self.bad = bad
        self.store: DeviceStore | HostStore | None = None
        self._on_random, self._on_full, self._on_bad = on_random, on_full, on_bad
        self._on_worker_start = on_worker_start
        self._aside: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.puts_aside = False
        self._pool: WorkerPool | None = None
        self.staging = Staging(batch_size, layout.row_bytes, device)

    def missing(self, batches: Iterable[torch.Tensor]) -> bool:
        """Whether any sample of ``batches`` still has to be read from the source."""
        every, store = list(batches), self.store
        return store is None or bool(every and not store.has(self._asked(every)).all())

    def lacking(self, batches: list[torch.Tensor]) -> torch.Tensor:
        """The samples of ``batches`` that the store does not have, each once."""
        assert self.store is not None
        asked = self._asked(batches)
        lacking: torch.Tensor = torch.unique(asked[~self.store.has(asked)])
        return lacking

    def _asked(self, batches: list[torch.Tensor]) -> torch.Tensor:
        return sample_of(self.bad.without_bad(torch.cat(batches)))

    def open_store(self, store: DeviceStore | HostStore | None) -> None:
        """Keep what is read from now on, and what was put aside until now; None keeps nothing."""
        self.store, self.puts_aside = store, False
        aside, self._aside = self._aside, []
        for indices, rows in aside if store is not None else ():
            if isinstance(store, DeviceStore):
                store.write(indices.to(self.device), rows.to(self.device))
                store.present[indices] = True
            else:
                assert store is not None
                self._keep(store, indices, rows)

    def resize(self, batch_size: int) -> None:
        """Serve batches of up to ``batch_size`` from now on; what is kept stays."""
        self.stop_workers()
        self.batch_size, self.staging = batch_size, Staging(batch_size, self.layout.row_bytes, self.device)

    def start_workers(self) -> None:
        """Start the workers; call it on the main thread, where forking is safest.

        Each pass has workers of its own: an iterator put aside must not hold up the one that comes after it.
        """
        if self._pool is not None and (self._pool.closed or self._pool.streams):
            self.stop_workers()
        if self._pool is None:
            self._pool = WorkerPool(
                self.reader,
                self.layout.row_bytes,
                self.batch_size,
                workers=self.workers,
                slots=self._slots(),
                device=self.device,
                on_worker_start=self._on_worker_start,
            )

    def _slots(self) -> int:
        small = SLOTS * self.batch_size * self.layout.row_bytes <= SLOT_BYTES
        return SLOTS if self.workers and small else 2

    def stop_workers(self) -> None:
        """End the workers and free their slots; reading starts them again.

        A pass that is still under way (an iterator put aside) keeps its own until it ends.
        """
        pool, self._pool = self._pool, None
        if pool is not None and not pool.streams:
            pool.close()

    def close(self) -> None:
        """End the workers and give the store back."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        if self.store is not None:
            self.store.close()
            self.store = None
        self.staging = Staging(self.batch_size, self.layout.row_bytes, self.device)

    def host_batches(self, batches: Iterable[torch.Tensor], epoch: int) -> Generator[HostBatch, None, None]:
        """One HostBatch for each batch, in order. For a device store it holds only the rows that are missing there."""
        plans: deque[_Plan] = deque()
        slots = self._stream(self._plan(batches, plans), epoch)
        slot: _Read | None = None
        with self.staging.for_a_pass() as free_buffer:
            try:
                while True:
                    if not plans or (len(plans[0].wanted) and slot is None):
                        slot = next(slots, None)
                        if not plans:
                            return
                    plan = plans.popleft()
                    if not len(plan.wanted):
                        yield self._from_store(plan, free_buffer)
                    else:
                        assert slot is not None
                        mine, slot = slot, None
                        yield self._from_slot(plan, mine, free_buffer)
            finally:
                if slot is not None:
                    slot[0].release(slot[1])
                slots.close()

    # ----------------------------------------------------------------- planning

    def _plan(self, batches: Iterable[torch.Tensor], plans: deque[_Plan]) -> Iterator[torch.Tensor]:
        """Append a plan for each batch; yields the samples to read for those that need any."""
        underway: torch.Tensor | None = None
        for batch in batches:
            store = self.store
            draws = self.bad.without_bad(batch)
            if store is None:
                wanted = draws
            else:
                indices = sample_of(draws)
                if underway is None:
                    underway = torch.zeros(self.bad.samples, dtype=torch.bool)
                # A sample asked for by an earlier batch will be there when this batch is assembled.
                wanted = torch.unique(indices[~(store.has(indices) | underway[indices])])
                underway[wanted] = True
            plans.append(_Plan(draws, wanted, store))
            if len(wanted):
                yield wanted

    def _stream(self, wanted: Iterator[torch.Tensor], epoch: int) -> Generator[_Read, None, None]:
        first = next(wanted, None)
        if first is None:
            return  # everything is kept: no workers are needed
        self.start_workers()
        pool = self._pool
        assert pool is not None

        def all_of_it() -> Iterator[torch.Tensor]:
            yield first
            yield from wanted

        with contextlib.closing(pool.stream(all_of_it(), epoch)) as slots:
            for slot in slots:
                yield pool, slot

    # ----------------------------------------------------------------- assembling

    def _from_slot(self, plan: _Plan, read_slot: _Read, free_buffer: Callable[[], Buffer]) -> HostBatch:
        pool, slot = read_slot
        try:
            self._judge(slot.failures or [])
        except BaseException:
            pool.release(slot)
            raise
        read, rows = slot.indices[: slot.count].clone(), slot.rows[: slot.count]
        if self.bad.failures:
            good = ~self.bad.bad[sample_of(read)]
            if not bool(good.all()):
                read, rows = read[good], rows[good]
        draws = self.bad.without_bad(plan.draws)
        # A batch that was asked for before there was a store goes into the one that has come since.
        store = plan.store or self.store
        if store is None:
            if self.puts_aside and len(self._aside) < min(PUT_ASIDE, PUT_ASIDE_BYTES // max(rows.nbytes, 1)):
                self._aside.append((sample_of(read), rows.clone()))
            return HostBatch(read, rows, read, lambda: pool.release(slot))
        read = sample_of(read)
        if isinstance(store, DeviceStore):
            return HostBatch(draws, rows, read, lambda: pool.release(slot), store)
        if self.store is store:
            self._keep(store, read, rows)
        batch = self._gather(store, draws, read, rows, free_buffer)
        pool.release(slot)
        return batch

    def _from_store(self, plan: _Plan, free_buffer: Callable[[], Buffer]) -> HostBatch:
        draws = self.bad.without_bad(plan.draws)
        none, no_rows = draws[:0], torch.empty(0, self.layout.row_bytes, dtype=torch.uint8)
        if plan.store is None or isinstance(plan.store, DeviceStore):  # None: every sample of it is known to be bad
            return HostBatch(draws, no_rows, none, store=plan.store)
        return self._gather(plan.store, draws, none, no_rows, free_buffer)

    def _keep(self, store: HostStore, indices: torch.Tensor, rows: torch.Tensor) -> None:
        try:
            store.write(indices, rows)
        except CacheFull as full:
            self._on_full(full)

    def _gather(
        self,
        store: HostStore,
        draws: torch.Tensor,
        read: torch.Tensor,
        rows: torch.Tensor,
        free_buffer: Callable[[], Buffer],
    ) -> HostBatch:
        indices = sample_of(draws)
        there = store.has(indices)
        if store.pinned and self.layout.row_bytes >= DIRECT_ROW_BYTES and bool(there.all()):
            return HostBatch(draws, store.rows, indices, store=store, scattered=True)
        buffer, release = free_buffer()
        out = buffer[: len(indices)]
        try:
            if bool(there.all()):
                store.gather(indices, out)
            else:
                self._patch(store, indices, there, read, rows, out)
        except BaseException:
            release()
            raise
        return HostBatch(draws, out, indices, release)

    def _patch(
        self,
        store: HostStore,
        indices: torch.Tensor,
        there: torch.Tensor,
        read: torch.Tensor,
        rows: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Assemble a batch of which the store could not keep all rows: from the store, from ``rows``, or read now."""
        at = {index: position for position, index in enumerate(read.tolist())}
        for position, index in enumerate(indices.tolist()):
            if there[position]:
                out[position] = store.rows[index]
            elif index in at:
                out[position] = rows[at[index]]
            else:
                self._judge(self.reader.read(indices[position : position + 1], out[position : position + 1], 0))

    # ----------------------------------------------------------------- what went wrong

    def _judge(self, failures: list[Failure]) -> None:
        for failure in self.bad.note(failures):
            self._on_bad(failure)
        for failure in failures:
            if failure.kind == "random":
                self._on_random(failure)
