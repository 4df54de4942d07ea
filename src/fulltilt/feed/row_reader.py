"""The rows of every batch in host memory: from the store where they are kept, from the workers where not yet."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass

import torch

from fulltilt.errors import UsageError
from fulltilt.feed.disk_cache import CacheFull
from fulltilt.feed.epoch_order import sample_of
from fulltilt.feed.sample_layout import Layout
from fulltilt.feed.sample_reader import BadSamples, Failure, Reader
from fulltilt.feed.storage import DeviceStore, HostStore
from fulltilt.feed.worker_pool import WorkerPool

# Batches read ahead by the workers: enough to bridge a slow sample or a validation pause, few enough to stay small.
SLOTS = 4
# Above this, two batches have to do: one being read while the other is copied.
SLOT_BYTES = 2 * 1024**3
# Rows at least this long are copied to the device one by one from pinned memory: a copy call then costs less than
# moving the row to a buffer first.
DIRECT_ROW_BYTES = 64 * 1024

Store = DeviceStore | HostStore


@dataclass
class HostRows:
    """A batch, or the part of it that a device ``store`` lacks, in host memory.

    ``samples`` are the samples of the ``rows`` that are to go into the device store; with ``scattered``, ``rows`` is
    a whole pinned store and the batch is its rows ``samples``.
    """

    draws: torch.Tensor
    rows: torch.Tensor
    samples: torch.Tensor
    store: DeviceStore | None = None
    scattered: bool = False


@dataclass
class _Plan:
    draws: torch.Tensor
    wanted: torch.Tensor
    store: Store | None


class RowReader:
    """Assembles batches in order, and keeps what was read in ``store`` (which may come, go and be None).

    ``on_failure`` and ``on_full`` are told, on whatever thread reads, of a bad or random sample and that the store ran
    out of room; both may set ``store`` to None.
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
        on_failure: Callable[[Failure], None],
        on_full: Callable[[CacheFull], None],
        on_worker_start: Callable[[], None] | None = None,
    ) -> None:
        self.reader, self.layout, self.batch_size, self.workers = reader, layout, batch_size, workers
        self.bad = bad
        self.store: Store | None = None
        self._device = device
        self._on_failure, self._on_full, self._on_worker_start = on_failure, on_full, on_worker_start
        self._idle: list[WorkerPool] = []
        self._in_use: weakref.WeakSet[WorkerPool] = weakref.WeakSet()

    def lacking(self, batches: list[torch.Tensor]) -> torch.Tensor:
        """The samples of ``batches`` that are to be read from the source, each once."""
        asked = sample_of(self.bad.without_bad(torch.cat(batches))) if batches else torch.empty(0, dtype=torch.int64)
        lacking: torch.Tensor = torch.unique(asked if self.store is None else asked[~self.store.has(asked)])
        return lacking

    # ----------------------------------------------------------------- workers

    def take_pool(self) -> WorkerPool:
        """Workers for one pass; call it on the main thread, where forking is safest.

        An iterator put aside keeps its own, so that it does not hold up the pass that comes after it.
        """
        pool = self._idle.pop() if self._idle else self._new_pool()
        self._in_use.add(pool)
        return pool

    def give_back(self, pool: WorkerPool) -> None:
        """The pass is over; the next one may have its workers."""
        self._in_use.discard(pool)
        if pool.closed or pool.retired or self._idle:
            pool.close()
        else:
            self._idle.append(pool)

    def _new_pool(self) -> WorkerPool:
        small = SLOTS * self.batch_size * self.layout.row_bytes <= SLOT_BYTES
        return WorkerPool(
            self.reader,
            self.layout.row_bytes,
            self.batch_size,
            workers=self.workers,
            slots=(SLOTS if small else 2) if self.workers else 1,
            device=self._device,
            on_worker_start=self._on_worker_start,
        )

    def stop_workers(self) -> None:
        """End the workers that no pass is using; those of a pass under way end with it."""
        for pool in self._in_use:
            pool.retired = True
        while self._idle:
            self._idle.pop().close()

    def resize(self, batch_size: int) -> None:
        """Serve batches of up to ``batch_size`` from now on; what is kept stays."""
        self.stop_workers()
        self.batch_size = batch_size

    def close(self) -> None:
        """End all workers and give the store back."""
        self.stop_workers()
        for pool in list(self._in_use):
            pool.close()
        if self.store is not None:
            self.store.close()
            self.store = None

    # ----------------------------------------------------------------- batches

    def host_rows(
        self, batches: Iterable[torch.Tensor], epoch: int, pool: WorkerPool | None, buffer: Callable[[], torch.Tensor]
    ) -> Generator[HostRows, None, None]:
        """Each batch in a ``buffer()`` [batch, row_bytes], in order; without a ``pool`` all of it has to be kept."""
        plans: deque[_Plan] = deque()
        wanted = self._plan(batches, plans)
        nothing: tuple[torch.Tensor, list[Failure]] = torch.empty(0, self.layout.row_bytes, dtype=torch.uint8), []
        read = pool.stream(wanted, epoch) if pool is not None else (nothing for _ in wanted)
        with contextlib.closing(read):
            for rows, failures in read:
                yield self._assembled(plans.popleft(), rows, failures, buffer)

    def _plan(self, batches: Iterable[torch.Tensor], plans: deque[_Plan]) -> Iterator[torch.Tensor]:
        """Append a plan for each batch; yields the draws to read for it."""
        underway = torch.zeros(self.bad.samples, dtype=torch.bool)
        for batch in batches:
            store, draws = self.store, self.bad.without_bad(batch)
            wanted = draws
            if store is not None:
                samples = sample_of(draws)
                # A sample asked for by an earlier batch will be there when this batch is assembled.
                wanted = torch.unique(samples[~(store.has(samples) | underway[samples])])
                underway[wanted] = True
            plans.append(_Plan(draws, wanted, store))
            yield wanted

    def _assembled(
        self, plan: _Plan, rows: torch.Tensor, failures: list[Failure], buffer: Callable[[], torch.Tensor]
    ) -> HostRows:
        if len(rows) != len(plan.wanted):
            raise UsageError("the loader was closed while this iterator was in use", "Begin another pass over it.")
        self._judge(failures)
        read = plan.wanted
        if self.bad.failures:
            good = ~self.bad.bad[sample_of(read)]
            read, rows = read[good], rows[good]
        # A batch that was asked for before there was a store goes into the one that has come since.
        store = plan.store or self.store
        if isinstance(store, HostStore):
            return self._gathered(store, self.bad.without_bad(plan.draws), sample_of(read), rows, buffer)
        out = buffer()[: len(rows)]
        out.copy_(rows)
        draws = read if store is None else self.bad.without_bad(plan.draws)
        return HostRows(draws, out, sample_of(read) if store is not None else read[:0], store)

    def _gathered(
        self,
        store: HostStore,
        draws: torch.Tensor,
        read: torch.Tensor,
        rows: torch.Tensor,
        buffer: Callable[[], torch.Tensor],
    ) -> HostRows:
        if len(read):
            try:
                store.write(read, rows)
            except CacheFull as full:
                self._on_full(full)
        samples = sample_of(draws)
        there = store.has(samples)
        out = buffer()[: len(samples)]
        if store.pinned and self.layout.row_bytes >= DIRECT_ROW_BYTES and bool(there.all()):
            return HostRows(draws, store.rows, samples, scattered=True)
        store.gather(samples, out)
        for place in (~there).nonzero().flatten().tolist():  # the disk is full
            self._judge(self.reader.read(draws[place : place + 1], out[place : place + 1], 0))
        return HostRows(draws, out, samples[:0])

    def _judge(self, failures: list[Failure]) -> None:
        for failure in [*self.bad.note(failures), *(failure for failure in failures if failure.kind == "random")]:
            self._on_failure(failure)
