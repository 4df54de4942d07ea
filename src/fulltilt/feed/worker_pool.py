"""Worker processes that write samples straight into shared batch slots.

Against torch's DataLoader: several workers fill one batch together (low latency, few batches in memory), nothing is
collated or pickled, no shared-memory file is opened for a batch, and rows keep the data set's own dtype (uint8, not
float32). A task is 24 bytes on one pipe; its indices lie in shared memory beside the slot.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import platform
import signal
import struct
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import BaseContext
from typing import Any, Self, TypeVar

import torch
from torch.utils.data._utils import worker as of_torch

from fulltilt.errors import FulltiltError, MachineError, UsageError
from fulltilt.feed.sample_reader import Failure, Reader
from fulltilt.feed.storage import pin, shared_bytes, start_method

_TASK = struct.Struct("=iiiiq")  # slot, first row, row after the last, 0, epoch
_STOP = b""
# Workers look this often whether their parent is still there.
_PARENT_CHECK_S = 2.0
# Some data sets read an index of all their files before their first sample.
PATIENCE_S = 300.0
# Arm's library of convolutions asks for threads whatever torch was told, and a fork does not copy them: it waits for
# ever, in a DataLoader's workers as in these. torch's own convolutions do not.
_HANGS_IN_A_FORK = platform.machine() in ("aarch64", "arm64")

Result = TypeVar("Result")


@dataclass
class Slot:
    """One batch in the making: shared rows and indices, how many rows are still out, and what failed."""

    number: int
    rows: torch.Tensor
    indices: torch.Tensor
    count: int = 0
    outstanding: int = 0
    failures: list[Failure] | None = None


class WorkerPool:
    """Reads batches ahead of their use. ``workers=0`` reads in this process, at the moment of asking."""

    @torch.inference_mode(False)  # made in an evaluation, its memory has to be of use to other threads
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
        self.workers = workers
        self.rows_per_slot = rows_per_slot
        self._reader = reader
        self._on_worker_start = on_worker_start
        slot_bytes = rows_per_slot * row_bytes
        # One block for all slots: one registration with the driver, one mapping to inherit.
        self._memory = shared_bytes(slots * slot_bytes)
        # Behind the indices of all slots, one number each that says whether the slot is still wanted.
        self._index_memory = shared_bytes(slots * (rows_per_slot + 1) * 8)
        self._broken = False
        self.streams = 0  # passes that are under way
        rows = self._memory.view(slots, rows_per_slot, row_bytes)
        indices, self._wanted = _index_views(self._index_memory, rows_per_slot)
        self._slots = [Slot(n, rows[n], indices[n]) for n in range(slots)]
        self._free = deque(self._slots)
        self._processes: list[Any] = []
        self._results: list[connection.Connection] = []
        self._tasks: connection.Connection | None = None
        if workers:
            try:
                self._start(workers)
            except OSError as error:
                self.close()
                raise no_processes(workers, error) from error
        self.pinned = pin(self._memory, device, self)

    # ----------------------------------------------------------------- the parent's side

    def stream(self, batches: Iterable[torch.Tensor], epoch: int) -> Generator[Slot, None, None]:
        """Slots filled with ``batches`` in their order. The caller hands each back with ``release``.

        As many batches are read ahead as there are free slots.
        """
        waiting: deque[Slot] = deque()
        source = iter(batches)
        exhausted = False
        self.streams += 1
        try:
            while True:
                while self._free and not exhausted:
                    batch = next(source, None)
                    if batch is None:
                        exhausted = True
                        break
                    slot = self._free.popleft()
                    # In the queue before it is submitted: whatever happens, it is drained and given back.
                    waiting.append(slot)
                    self._submit(slot, batch, epoch)
                if not waiting:
                    assert exhausted, "a slot was not released"
                    return
                self._wait(waiting[0])
                yield waiting.popleft()
        finally:
            self.streams -= 1
            for slot in waiting:
                self._wanted[slot.number] = 0  # what no worker has begun is not read any more
            for slot in waiting:
                # A worker may still be writing into it: only a finished slot can be used again.
                self._drain(slot)
                self._free.append(slot)

    @property
    def closed(self) -> bool:
        """Whether a worker died or the pool was closed: it is of no further use."""
        return self._broken

    def release(self, slot: Slot) -> None:
        """The rows of ``slot`` were copied away; it may be filled again."""
        self._free.append(slot)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        # A loader that was dropped without being closed must not leave processes behind.
        with contextlib.suppress(Exception):
            self.close()

    def close(self) -> None:
        """End the workers and give their memory back."""
        self._broken = True  # before they end: an iterator that outlives the pool must not take that for a death
        if self._tasks is not None:
            for _ in self._processes:
                try:
                    self._tasks.send_bytes(_STOP)
                except OSError:
                    break
        deadline = time.monotonic() + 2.0
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()  # in the middle of a slow sample; it holds nothing that has to be saved
                process.join()
        for end in [*self._results, *([self._tasks] if self._tasks is not None else [])]:
            end.close()
        self._processes, self._results, self._tasks = [], [], None

    def _start(self, workers: int) -> None:
        context: BaseContext = multiprocessing.get_context(start_method())
        reading, self._tasks = context.Pipe(duplex=False)
        lock = context.Lock()
        for number in range(workers):
            mine, theirs = context.Pipe(duplex=False)
            memory = (self._memory, self._index_memory, self.rows_per_slot)
            place = (number, workers)
            arguments = (self._reader, place, *memory, reading, lock, theirs, os.getpid(), self._on_worker_start)
            process = context.Process(  # type: ignore[attr-defined]
                target=_work, args=arguments, name=f"fulltilt-feed-{number}", daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._results.append(mine)
        reading.close()

    def _refuse_if_closed(self) -> None:
        """Another thread may close the pool at any moment, and then workers end and pipes break without a fault."""
        if self._broken:
            raise UsageError("the loader was closed while this iterator was in use", "Begin another pass over it.")

    def _submit(self, slot: Slot, batch: torch.Tensor, epoch: int) -> None:
        self._refuse_if_closed()
        slot.count = len(batch)
        slot.failures = []
        slot.indices[: slot.count] = batch
        self._wanted[slot.number] = 1
        slot.outstanding = 0
        if self._tasks is None:
            slot.failures = self._reader.read(slot.indices[: slot.count], slot.rows[: slot.count], epoch)
            return
        share = self._rows_per_task(slot.count)
        for start in range(0, slot.count, share):
            stop = min(start + share, slot.count)
            try:
                self._tasks.send_bytes(_TASK.pack(slot.number, start, stop, 0, epoch))
            except OSError as error:  # nobody is left at the other end
                self._refuse_if_closed()
                self._broken = True
                dead = next((process for process in self._processes if not process.is_alive()), self._processes[0])
                raise self._worker_died(dead.sentinel) from error
            slot.outstanding += stop - start

    def _rows_per_task(self, count: int) -> int:
        # Two tasks a worker and batch even out samples of unequal cost; a task much smaller would be all overhead.
        return max(1, -(-count // (2 * max(self.workers, 1))))

    def _wait(self, slot: Slot) -> None:
        while slot.outstanding:
            self._refuse_if_closed()
            sentinels = [process.sentinel for process in self._processes]
            try:
                told = connection.wait([*self._results, *sentinels], timeout=30.0)
            except (OSError, ValueError):  # a pipe was closed meanwhile
                self._refuse_if_closed()
                raise
            for ready in told:
                if isinstance(ready, connection.Connection):
                    self._receive(ready)
                else:
                    self._collect_last_words()
                    if slot.outstanding:
                        self._refuse_if_closed()
                        self._broken = True
                        raise self._worker_died(ready)

    def _receive(self, end: connection.Connection) -> bool:
        """Take one message in; False if there will be no more."""
        try:
            number, rows, failures = end.recv()
        except (EOFError, OSError):
            return False  # its process has ended; the sentinel tells
        slot = self._slots[number]
        slot.outstanding -= rows
        if slot.failures is not None:
            slot.failures += failures
        return True

    def _collect_last_words(self) -> None:
        for end in self._results:
            with contextlib.suppress(OSError):  # closed meanwhile
                while end.poll() and self._receive(end):
                    pass

    def _drain(self, slot: Slot) -> None:
        if self._broken:
            return  # nothing of it is used again
        try:
            self._wait(slot)
        except (MachineError, UsageError):
            pass  # a worker died after the batches that were wanted, or the pool was closed: new ones start if needed

    def _worker_died(self, sentinel: Any) -> MachineError:
        process = next(p for p in self._processes if p.sentinel == sentinel)
        process.join(1.0)
        code = process.exitcode
        if code == -signal.SIGKILL:
            return MachineError(
                f"a loader worker died: pid {process.pid} got SIGKILL, most likely from the OOM killer",
                f"Use fewer workers than {self.workers}, or give the job more memory.",
            )
        if code == -signal.SIGBUS:
            return MachineError(
                f"a loader worker (pid {process.pid}) died of a bus error: /dev/shm is too small, or a disk is full",
                "Give the container more (docker run --shm-size=8g), use fewer workers, or free the disk of the cache.",
            )
        how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        return MachineError(
            f"a loader worker died: pid {process.pid} {how}",
            "The data set's own code ended it; run once without workers to see where.",
        )


def no_processes(workers: int, error: OSError) -> MachineError:
    """The error for workers that the system does not let start."""
    return MachineError(
        f"{workers} loader workers cannot be started: {error.strerror or error}",
        "Use a smaller num_workers, or allow more open files (ulimit -n) and processes (ulimit -u).",
    )


def _index_views(memory: torch.Tensor, rows_per_slot: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The indices [slots, rows] and the wanted marks [slots] that lie in ``memory``, as parent and workers see them."""
    words = memory.view(torch.int64)
    slots = len(words) // (rows_per_slot + 1)
    return words[:-slots].view(slots, rows_per_slot), words[-slots:]


# --------------------------------------------------------------------------- the worker's side


def _work(
    reader: Reader,
    place: tuple[int, int],
    memory: torch.Tensor,
    index_memory: torch.Tensor,
    rows_per_slot: int,
    tasks: connection.Connection,
    lock: Any,
    results: connection.Connection,
    parent: int,
    on_start: Callable[[], None] | None,
) -> None:
    # Ctrl-C goes to the whole process group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    become_worker(*place, getattr(reader, "dataset", None))
    indices, wanted = _index_views(index_memory, rows_per_slot)
    rows = memory.view(len(indices), rows_per_slot, -1)
    if on_start is not None:
        on_start()
    reader.opened_in_worker()
    while True:
        with lock:
            while not tasks.poll(_PARENT_CHECK_S):
                if os.getppid() != parent:
                    return
            message = tasks.recv_bytes()
        if message == _STOP:
            return
        number, start, stop, _, epoch = _TASK.unpack(message)
        failures = []
        if wanted[number]:
            failures = reader.read(indices[number, start:stop], rows[number, start:stop], epoch)
        try:
            results.send((number, stop - start, failures))
        except OSError:
            return  # the parent has gone


# --------------------------------------------------------------------------- what a worker is to the data set


class _WorkerInfo:
    """What ``get_worker_info()`` answers in a worker; its seed is that of the sample."""

    def __init__(self, number: int, workers: int, dataset: Any) -> None:
        self.id, self.num_workers, self.dataset = number, workers, dataset
        self.seed_of_sample = number

    @property
    def seed(self) -> int:
        """A number that differs from sample to sample and from epoch to epoch."""
        return self.seed_of_sample


def become_worker(number: int, workers: int, dataset: Any) -> None:
    """Behave as worker ``number`` of ``workers`` of a DataLoader over ``dataset``, for the rest of this process."""
    torch.set_num_threads(1)
    if _HANGS_IN_A_FORK:
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment, unused-ignore]
    of_torch._worker_info = _WorkerInfo(number, workers, dataset)  # type: ignore[assignment]


def in_child_process(call: Callable[[], Result], workers: int, dataset: Any = None) -> Result:
    """What ``call`` returns, called in a fork where workers are to run it too; raises what it raises of ours.

    What a data set opens or starts in this process (a handle, a library's threads) every worker forked later would
    inherit. Without workers, without fork, and for results that cannot be sent, it is called here.
    """
    if not workers or start_method() != "fork":
        return call()
    context = multiprocessing.get_context("fork")
    try:
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_answer, args=(call, theirs, workers, dataset), name="fulltilt-feed-check", daemon=True
        )
        process.start()
    except OSError as refused:
        raise no_processes(workers, refused) from refused
    theirs.close()
    try:
        if not mine.poll(PATIENCE_S):
            process.kill()
            raise MachineError(
                f"the data set gave no sample in a process of its own within {PATIENCE_S:.0f} s",
                "It may wait for a thread, which no fork copies: make pools where they are used, or have no workers.",
            )
        kind, *answer = pickle.loads(mine.recv_bytes())
    except EOFError:
        process.join()
        raise MachineError(
            f"the data set's own code ended its process with exit code {process.exitcode}",
            "Run once with num_workers=0 to see where.",
        ) from None
    finally:
        mine.close()
        if process.is_alive():
            process.join(1.0)
            process.kill()
        process.join()
    if kind == "error":
        error: FulltiltError = answer[0].__new__(answer[0])
        FulltiltError.__init__(error, *answer[1:3])
        for note in answer[3]:
            error.add_note(note)
        raise error
    return answer[0] if kind == "result" else call()


def _answer(call: Callable[[], Any], to: connection.Connection, workers: int, dataset: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    become_worker(0, workers, dataset)
    try:
        answer: tuple[Any, ...] = ("result", call())
    except FulltiltError as error:
        answer = ("error", type(error), error.what, error.remedy, getattr(error, "__notes__", []))
    except Exception:
        answer = ("unsent",)  # raised again where it is called once more
    try:
        sent = pickle.dumps(answer)
    except Exception:
        sent = pickle.dumps(("unsent",))
    with contextlib.suppress(OSError):
        to.send_bytes(sent)
