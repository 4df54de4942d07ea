"""Worker processes that write samples straight into shared memory.

Unlike with a DataLoader, several workers fill one batch together (low latency, few batches in memory), and nothing is
collated, pickled or sent through shared-memory files. The recorder and the tuner would also take a DataLoader for the
user's.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import platform
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any, TypeVar

import psutil
import torch
from torch.utils.data._utils import worker as of_torch

from fulltilt.errors import FulltiltError, MachineError, UsageError
from fulltilt.feed.epoch_order import is_whole, require
from fulltilt.feed.sample_reader import Failure, Reader
from fulltilt.feed.sample_store import pin, shared_bytes
from fulltilt.feed.tiers import local_ranks
from fulltilt.probes.host import cpu_capacity
from fulltilt.records import MOST_OF_A_SETTING

# Long enough for data sets that index all their files before the first sample.
PATIENCE_S = 300.0
# The Arm Compute Library waits for threads that a fork does not copy, and hangs, in DataLoader workers too; torch's own
# convolutions do not.
_HANGS_IN_A_FORK = platform.machine() in ("aarch64", "arm64")

Result = TypeVar("Result")


@dataclass
class _Slot:
    number: int
    rows: torch.Tensor
    draws: torch.Tensor
    count: int = 0
    outstanding: int = 0
    failures: list[Failure] = field(default_factory=list)


class WorkerPool:
    """Reads batches ahead of their use. With ``workers=0`` this process reads when asked."""

    @torch.inference_mode(False)  # may be made in an evaluation
    def __init__(
        self,
        reader: Reader,
        row_bytes: int,
        rows_per_slot: int,
        *,
        workers: int,
        slots: int,
        device: torch.device,
        on_worker_start: Callable[[], None] | None = None,
    ) -> None:
        self.workers, self.closed = workers, False
        self.retired = False  # to be closed when its pass ends
        self._reader = reader
        self._memory = shared_bytes(slots * rows_per_slot * row_bytes)
        views = self._memory.view(slots, rows_per_slot, row_bytes)
        # In shared memory, so that a task is a few bytes: a full pipe of tasks would block the parent.
        draws = shared_bytes(slots * rows_per_slot * 8).view(torch.int64).view(slots, rows_per_slot)
        self._slots = [_Slot(number, *parts) for number, parts in enumerate(zip(views, draws, strict=True))]
        self._processes: list[Any] = []
        if workers:
            context: Any = multiprocessing.get_context("fork")
            try:
                self._tasks, self._results = context.SimpleQueue(), context.SimpleQueue()
                for number in range(workers):
                    given = (reader, views, draws, number, workers, self._tasks, self._results, on_worker_start)
                    process = context.Process(target=_work, args=given, name=f"fulltilt-feed-{number}", daemon=True)
                    process.start()
                    self._processes.append(process)
            except OSError as error:
                self.close()
                raise _no_processes(workers, error) from error
        pin(self._memory, device, self)

    def stream(
        self, batches: Iterable[torch.Tensor], epoch: int
    ) -> Generator[tuple[torch.Tensor, list[Failure]], None, None]:
        """The rows of each batch and what failed, in order; the rows are valid until the next batch is asked for.

        As many batches are read ahead as there are slots. When it is left early, the workers are killed.
        """
        if not self.workers:
            for asked in batches:
                rows = self._slots[0].rows[: len(asked)]
                yield rows, self._reader.read(asked, rows, epoch) if len(asked) else []
            return
        free, waiting = deque(self._slots), deque[_Slot]()
        source = iter(batches)
        try:
            while True:
                while free and (batch := next(source, None)) is not None:
                    waiting.append(free.popleft())
                    self._submit(waiting[-1], batch, epoch)
                if not waiting:
                    return
                slot = waiting.popleft()
                self._wait(slot)
                yield slot.rows[: slot.count], slot.failures
                free.append(slot)
        finally:
            if any(slot.outstanding for slot in self._slots):
                self.close()

    def close(self) -> None:
        """End the workers; those in the middle of a sample are killed."""
        idle = not self.closed and not any(slot.outstanding for slot in self._slots)
        self.closed = True  # first, so that an iterator does not report dead workers
        processes, self._processes = self._processes, []
        for process in processes:
            with contextlib.suppress(OSError):
                self._tasks.put(None) if idle else process.kill()
        for process in processes:
            process.join(2.0)
            if process.is_alive():
                process.kill()
                process.join()

    def __del__(self) -> None:
        # For a loader that was not closed.
        with contextlib.suppress(Exception):
            self.close()

    def _submit(self, slot: _Slot, batch: torch.Tensor, epoch: int) -> None:
        self._refuse_if_closed()
        slot.count = slot.outstanding = len(batch)
        slot.failures = []
        slot.draws[: slot.count] = batch
        # Two tasks per worker and batch even out samples of unequal cost.
        share = max(1, -(-slot.count // (2 * self.workers)))
        for start in range(0, slot.count, share):
            self._tasks.put((slot.number, start, min(start + share, slot.count), epoch))

    def _wait(self, slot: _Slot) -> None:
        arriving = self._results._reader
        while slot.outstanding:
            self._refuse_if_closed()
            sentinels = {process.sentinel: process for process in self._processes}
            ready = connection.wait([arriving, *sentinels], timeout=1.0)
            if arriving in ready:
                number, rows, failures = self._results.get()
                self._slots[number].outstanding -= rows
                self._slots[number].failures += failures
            elif ready:
                self._refuse_if_closed()
                process = sentinels[ready[0]]
                process.join(1.0)
                raise worker_died(process.exitcode, f"pid {process.pid}")

    def _refuse_if_closed(self) -> None:
        if self.closed:
            raise UsageError("the loader was closed while this iterator was in use", "Begin another pass over it.")


def _no_processes(workers: int, error: OSError) -> MachineError:
    return MachineError(
        f"{workers} loader workers cannot be started: {error.strerror or error}",
        "Use a smaller num_workers, or allow more open files (ulimit -n) and processes (ulimit -u).",
    )


def worker_died(code: int | None, who: str = "it") -> MachineError:
    """The error for a dead worker with this exit code, or None if that is not known, and what to do about it."""
    remedy = "The data set's own code ended it: run once without workers to see where."
    if code == -signal.SIGKILL:
        how = "got SIGKILL, most likely from the OOM killer"
        remedy = "Use fewer workers or a smaller prefetch, or give the job more memory."
    elif code == -signal.SIGBUS:
        how = "ran out of room: /dev/shm is too small, or a disk is full"
        remedy = "Give the container more (docker run --shm-size=8g), lower workers or prefetch, or free the disk."
    elif code == -signal.SIGSEGV:
        how = "died of a segmentation fault"
        remedy = "Run once without workers to see where; do not open HDF5 files before the workers start."
    elif code is None:
        how = "ended unexpectedly"
    else:
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return MachineError(f"a loader worker died: {who} {how}", remedy)


# --------------------------------------------------------------------------- the worker's side


def _work(
    reader: Reader,
    slots: torch.Tensor,
    draws: torch.Tensor,
    number: int,
    workers: int,
    tasks: Any,
    results: Any,
    on_start: Callable[[], None] | None,
) -> None:
    # Ctrl-C goes to the whole process group; the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Only the parent holds the queue open: when it is gone, the queue ends.
    tasks._writer.close()
    results._reader.close()
    _become_worker(number, workers, getattr(reader, "dataset", None))
    if on_start is not None:
        on_start()
    with contextlib.suppress(EOFError, OSError):
        while (task := tasks.get()) is not None:
            slot, start, stop, epoch = task
            failures = reader.read(draws[slot, start:stop], slots[slot, start:stop], epoch)
            results.put((slot, stop - start, failures))


def _become_worker(number: int, workers: int, dataset: Any) -> None:
    """Make this process look like worker ``number`` of ``workers`` of a DataLoader over ``dataset``."""
    torch.set_num_threads(1)
    if _HANGS_IN_A_FORK:
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment, unused-ignore]
    of_torch._worker_info = of_torch.WorkerInfo(id=number, num_workers=workers, seed=number, dataset=dataset)


def default_workers() -> int:
    """Decoding processes for this rank: one per physical core it may use; 0 in a daemon, which may have no children.

    A second thread on a core adds little to decoding and costs memory.
    """
    if multiprocessing.current_process().daemon:
        return 0
    usable = cpu_capacity().usable
    cores = psutil.cpu_count(logical=False) or int(usable)
    return max(1, int(min(usable, cores)) // local_ranks())


def asked_workers(number: int | None) -> int:
    """The workers that were asked for, or the default. Raises UsageError."""
    if number is None:
        return default_workers()
    right = is_whole(number) and number <= MOST_OF_A_SETTING
    require("num_workers", number, right, f"a whole number from 0 to {MOST_OF_A_SETTING:,}")
    return int(number)


def in_child_process(call: Callable[[], Result], workers: int, dataset: Any = None) -> Result:
    """What ``call`` returns, called in a forked child if there are workers. Raises its FulltiltErrors.

    Handles and threads that a data set opens in this process would be inherited by workers forked later. Without
    workers, and for results that cannot be pickled, it is called here.
    """
    if not workers:
        return call()
    context = multiprocessing.get_context("fork")
    try:
        mine, theirs = context.Pipe(duplex=False)
        given = (call, theirs, workers, dataset)
        process = context.Process(target=_answer, args=given, name="fulltilt-feed-check", daemon=True)
        process.start()
    except OSError as refused:
        raise _no_processes(workers, refused) from refused
    theirs.close()
    try:
        if not mine.poll(PATIENCE_S):
            raise MachineError(
                f"the data set gave no sample in a process of its own within {PATIENCE_S:.0f} s",
                "It may wait for a thread, which a fork does not copy: start threads in the worker, or use no workers.",
            )
        kind, answer = pickle.loads(mine.recv_bytes())
    except EOFError:
        process.join()
        raise worker_died(process.exitcode, f"pid {process.pid}") from None
    finally:
        mine.close()
        process.kill()
        process.join()
    if kind == "error":
        raise answer
    return answer if kind == "result" else call()


def _answer(call: Callable[[], Any], to: connection.Connection, workers: int, dataset: Any) -> None:
    _become_worker(0, workers, dataset)
    sent = pickle.dumps(("unsent", None))  # then the parent calls it, and raises its error
    with contextlib.suppress(Exception):
        try:
            sent = pickle.dumps(("result", call()))
        except FulltiltError as error:
            sent = pickle.dumps(("error", error))
    with contextlib.suppress(OSError):
        to.send_bytes(sent)
