"""Pools of workers: torch's own iterators over a DataLoader, made with other settings and fed by a share of the orders.

What is used of torch's iterators, the same from torch 2.8 to 2.15: ``_sampler_iter`` (where indices come from),
``_try_put_index`` (send one to a worker), ``_send_idx`` (the number of the next), ``_task_info`` (what is owed),
``_prefetch_factor`` (how many a worker may owe), ``_reset`` (the next pass), the answer of each worker to
``_ResumeIteration``, ``_try_get_data`` and ``_shutdown_workers``.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import _utils, dataloader
from torch.utils.data._utils import signal_handling

from fulltilt.probes.host import proportional_bytes
from fulltilt.recorder.loaders import LoaderTap, LoaderTaps
from fulltilt.tuning.live.orders import Orders, Share
from fulltilt.tuning.live.window import Knobs
from fulltilt.tuning.live.witness import Differs, Witness, is_same
from fulltilt.tuning.trial.throughput import ready_batches

ASK_EVERY_S = 0.5
# Page tables of a large process take milliseconds to add up: a few workers stand for all.
MEASURED_WORKERS = 3


class PoolFailed(RuntimeError):  # noqa: N818 - it says what happened
    """A pool of ours did not start, died, or does not deliver: what torch raises as a RuntimeError."""


class WatchedWorkers(dataloader._MultiProcessingDataLoaderIter):
    """torch's iterator over workers, in which a dead or silent worker is an exception at next() and nothing else.

    torch raises the death of a worker in the training thread wherever that stands, through SIGCHLD. A pool on trial
    must not end the job, so its workers are taken out of that list, and asked for while their batch is waited for.
    And its queue may be made deeper or shorter while it serves.
    """

    patience_s: float | None = None

    def __init__(self, blueprint: Any) -> None:
        super().__init__(blueprint)
        signal_handling._remove_worker_pids(id(self))  # type: ignore[attr-defined]
        self._worker_pids_set = False

    def _try_put_index(self) -> None:
        if len(self._task_info) < self._prefetch_factor * self._num_workers:  # one made shorter is used up first
            super()._try_put_index()

    def _get_data(self) -> Any:
        began_s = time.monotonic()
        while True:
            try:
                got, answer = self._try_get_data(ASK_EVERY_S)  # type: ignore[no-untyped-call]
            except (OSError, EOFError) as error:  # the batch of a dead worker cannot be opened
                raise PoolFailed(f"a worker exited unexpectedly ({error})") from error
            if got:
                return answer
            if self._pin_memory and not self._pin_memory_thread.is_alive():
                raise PoolFailed("its pinning thread has ended")
            waited_s = time.monotonic() - began_s
            if self.patience_s is not None and waited_s > self.patience_s:
                raise PoolFailed(f"no batch came for {waited_s:.0f} s")


class Blueprint:
    """A DataLoader as torch's iterators see it, with other settings and with nothing to draw yet.

    It has a generator of its own, so that starting a pool draws nothing from the job's.
    """

    def __init__(self, loader: Any, knobs: Knobs, seed: int) -> None:
        self._loader = loader
        self.num_workers = knobs.workers
        self.prefetch_factor = knobs.prefetch if knobs.workers else None
        self.pin_memory = knobs.pin
        self.persistent_workers = knobs.workers > 0
        # One worker, or none, keeps the sampler's order also where the script does not ask for it.
        self.in_order = loader.in_order or loader.num_workers <= 1
        self.generator = torch.Generator().manual_seed(seed)
        self._index_sampler = ()
        if not knobs.workers:
            self.timeout = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class Pool:
    """One of torch's iterators with its share of the orders. ``own``: made here, not by the script's ``iter()``."""

    def __init__(self, iterator: Any, knobs: Knobs, own: bool) -> None:
        self.iterator = iterator
        self.knobs = knobs
        self.own = own
        self.final = not own  # nothing stands behind it: its errors are the script's
        self._share: Share | None = None
        self._absent = 0
        self._present_since_s = 0.0
        self._witnesses: dict[int, Witness] = {}

    # ------------------------------------------------------------------ orders in, batches out

    def join(self, orders: Orders, is_open: bool = False) -> None:
        """Draw indices from these orders from now on."""
        self._share = Share(orders, is_open, getattr(self.iterator, "_send_idx", 0))
        self.iterator._sampler_iter = self._share

    def has_joined(self, orders: Orders) -> bool:
        """Whether it draws from these orders."""
        return self._share is not None and self._share.orders is orders

    def open(self) -> None:
        """Take orders and send them to the workers, as many as they may have."""
        self._joined.is_open = True
        self._send(self._depth)

    def open_behind(self, before: Pool) -> None:
        """Take orders, as long as another pool runs dry only for the workers that it has no work for any more.

        With all of them at once, CPUs that are short would make these batches at the cost of those that come first.
        """
        self._joined.is_open = True
        at_work = min(before._owed - before.ready, before.knobs.workers)
        self._send(min(max(self.knobs.workers, before.knobs.workers) - at_work, self._depth))

    def mend(self, orders: Iterable[Any]) -> None:
        """Make the batches that another pool still owed, and no others."""
        self._joined.reserve(orders)
        self._send(self._depth)

    def can_become(self, knobs: Knobs) -> bool:
        """Whether no other pool is needed for these settings: they differ in the depth of the queue."""
        is_same = (knobs.workers, knobs.pin) == (self.knobs.workers, self.knobs.pin)
        return self.own and self.knobs.workers > 0 and is_same

    def become(self, knobs: Knobs) -> None:
        """Make the queue deeper or shorter while it serves."""
        self.knobs = knobs
        self.iterator._prefetch_factor = knobs.prefetch
        self._send(self._depth)

    @property
    def _depth(self) -> int:
        return self.knobs.workers * self.knobs.prefetch

    @property
    def _owed(self) -> int:
        return len(getattr(self.iterator, "_task_info", ()))

    def _send(self, at_most: int) -> None:
        """Send orders to the workers until they have so many."""
        for _ in range(at_most - self._owed if self.knobs.workers else 0):
            self.iterator._try_put_index()

    def close(self) -> None:
        """Take no more orders. Without workers one is still taken: meanwhile the next pool makes its first batch."""
        self._joined.close(reserve=0 if self.knobs.workers else 1)

    def draw(self) -> Any:
        """The next batch; StopIteration when no order is left for this pool."""
        self.forget_fulfilled()
        return next(self.iterator)

    def forget_fulfilled(self) -> None:
        """Between two draws: owe no more than what is still to come. One that fails owes what it was drawn for."""
        self._joined.keep_only(getattr(self.iterator, "_task_info", ()))

    @property
    def ready(self) -> int:
        """How many batches its workers have made that nobody has taken yet."""
        return ready_batches(self.iterator)

    @property
    def dry(self) -> bool:
        """Whether it has given all that it took and takes no more."""
        return self._joined.empty and not self._owed

    def unfulfilled(self) -> list[Any]:
        """Orders whose batches it still owes, the earliest first."""
        return self._joined.unfulfilled()

    @property
    def _joined(self) -> Share:
        assert self._share is not None
        return self._share

    # ------------------------------------------------------------------ life

    def call_roll(self, witnesses: list[Witness] | None = None) -> None:
        """Ask each worker to answer once it has started, and to make batches over again that are known."""
        if not self.knobs.workers:
            return
        queues = self.iterator._index_queues
        for queue in queues:
            queue.put(_utils.worker._ResumeIteration(None))
        self._absent = self.knobs.workers
        self._witnesses = dict(enumerate(witnesses or ()))
        for number, witness in self._witnesses.items():
            # Below zero, so that it is none of the orders.
            queues[number % len(queues)].put((-1 - number, witness.index))

    def is_warm(self) -> bool:
        """Whether all have answered. Raises when one has died or hangs, and Differs when one makes other batches."""
        while self._absent or self._witnesses:
            got, answer = self.iterator._try_get_data(0)
            if not got:
                patience_s = self.iterator.patience_s
                if not self._absent and patience_s and time.monotonic() - self._present_since_s > patience_s:
                    raise PoolFailed(f"no batch came for {patience_s:.0f} s")
                return False
            number, batch = answer
            if isinstance(number, _utils.worker._ResumeIteration):
                self._absent -= 1
                self._present_since_s = time.monotonic()
            elif number < 0:
                self._compare(self._witnesses.pop(-1 - number), batch)
        return True

    def _compare(self, witness: Witness, batch: Any) -> None:
        if isinstance(batch, ExceptionWrapper):
            batch.reraise()  # type: ignore[no-untyped-call]
        if not is_same(witness.batch, batch):
            raise Differs(is_prepared=self.iterator._worker_init_fn is not None)

    def next_pass(self, loader: Any) -> None:
        """Make it ready for another pass, also after one that was left early. Raises when a worker has died."""
        self.iterator._reset(Blueprint(loader, self.knobs, 0))

    def worker_bytes(self) -> int | None:
        """Memory of one worker (PSS), from a few of them; None without workers."""
        sizes = [size for pid in self._pids()[:MEASURED_WORKERS] if (size := proportional_bytes(pid))]
        return max(sizes) if sizes else None

    def _pids(self) -> list[int]:
        return [worker.pid for worker in getattr(self.iterator, "_workers", ()) if worker.pid is not None]

    def retire(self, failed: bool = False) -> None:
        """End its workers, beside the training thread: joining them takes a moment."""
        if self.knobs.workers:
            threading.Thread(target=_end, args=(self.iterator, failed), name="fulltilt-retire", daemon=True).start()


def _end(iterator: Any, failed: bool) -> None:
    if failed:
        for worker in iterator._workers:
            worker.kill()  # it may hang, and would be waited for
    iterator._shutdown_workers()


def make_pool(loader: Any, knobs: Knobs, seed: int, taps: LoaderTaps, tap: LoaderTap, patience_s: float) -> Pool:
    """Start a pool with these settings, without orders yet. Raises whatever starting processes raises."""
    blueprint = Blueprint(loader, knobs, seed)
    if not knobs.workers:
        return Pool(dataloader._SingleProcessDataLoaderIter(blueprint), knobs, own=True)
    iterator = taps.with_meters(lambda: WatchedWorkers(blueprint), tap)
    iterator.patience_s = patience_s
    if iterator._pin_memory:
        # Up to 2.14, torch's own exit handler waits five seconds for each worker of such a pool. This one comes first.
        atexit.register(_end_if_there, weakref.ref(iterator))
    return Pool(iterator, knobs, own=True)


def _end_if_there(reference: weakref.ref[Any]) -> None:
    if (iterator := reference()) is not None:
        iterator._shutdown_workers()


def begin_as_the_script_would(loader: Any, first_pass: bool) -> tuple[Iterator[Any], int | None]:
    """The sampler's iterator of a new pass, and the seed of its workers: drawn as torch's own iterator would draw them.

    Everything that ``iter(loader)`` takes from a random generator is taken here, once and in the same order: the base
    seed unless the script's own workers persist, and what the sampler draws when it is asked to begin.
    """
    workers = loader.num_workers > 0
    if workers and loader.persistent_workers and not first_pass:
        return iter(loader._index_sampler), None
    iterator = dataloader._BaseDataLoaderIter(loader)
    if workers:
        iterator._reset(loader, first_iter=True)
    return iterator._sampler_iter, int(iterator._base_seed)
