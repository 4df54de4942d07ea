"""Inside a loader worker: what fetching costs, in CPU and in waiting, and on which lines.

The training process replaces torch's worker loop by :func:`run_worker`, which runs the original loop with a timer
around each fetch and a stack sampler on another thread. Figures go to the recorder in datagrams, at first two a second,
through a socket that only workers inherit: no file, no name, no lock. A worker that dies loses its last figures.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import socket
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from fulltilt.recorder.interpreter_lock import SwitchInterval, cpu_clock, cpu_s, cpu_times_s, wake_on_time
from fulltilt.recorder.stacks.frames import stack_of, view_of
from fulltilt.recorder.stacks.line_times import LineGrowth, LineTimes
from fulltilt.recorder.user_code import leave_out_ours
from fulltilt.records import HotLine, MemoryGrowthRecord, StorageReading, WorkerRecord

# A stack sample costs the worker 0.4 ms: often at first, so that short jobs have their lines, then rarely.
EARLY_SAMPLES, EARLY_SAMPLE_EVERY_S = 500, 0.02
SAMPLE_EVERY_S = 0.1
# The training process pays 0.1 ms for each message, so later ones come rarely too.
SEND_EVERY_S, EARLY_MESSAGES, LATER_SEND_EVERY_S = 0.5, 64, 2.0
LARGEST_DATAGRAM = 65_536
QUEUE_BYTES = 1 << 20  # many workers may end together
MOST_PASSES = 16  # whose reads are counted separately
STEADY = 0.5  # growth is steady where its rate has not fallen by more than half
# The storage of a worker's files is reported once this many have been seen, or after this many samples.
ENOUGH_FILES, FILE_SAMPLES = 8, 100
NO_DATA = ("/proc/", "/sys/", sys.prefix, sys.base_prefix)


# The worker loops by the module that holds them. A forked worker inherits them from here; a spawned one imports them.
plain_loops: dict[str, Callable[..., None]] = {}
# The recorder of this process. A spawned worker has one, too: it attaches itself like any Python process.
process_recorder: Any = None


def home_of_loop(module: str) -> Any:
    """The module whose worker loop the iterators of ``module`` use: torch's, unless it has its own."""
    own = sys.modules.get(module)
    return own if hasattr(own, "_worker_loop") else importlib.import_module("torch.utils.data._utils.worker")


@dataclass(frozen=True)
class MemoryReading:
    """Memory of a worker at one moment, and the batches that it had made by then."""

    at_s: float
    private_bytes: int
    shared_bytes: int
    batches: int


@dataclass
class WorkerMessage:
    """What one worker did so far: only its last message counts. ``lines`` are those since the message before.

    ``read_bytes`` are from storage, ``reads`` are calls. ``memory`` holds the last three readings, ``cpus`` are those
    that it may run on. ``data``, the storage of its files, is sent once. ``first_batches`` are those that began a
    pass, ``first_lines`` those of ``lines`` that made them.
    """

    loader: int
    pid: int
    in_pass: int  # when it began
    batches: int = 0
    first_batches: int = 0
    first_fetch_s: float = 0.0
    first_fetch_cpu_s: float = 0.0
    first_cpu_wait_s: float = 0.0
    fetch_s: float = 0.0
    fetch_cpu_s: float = 0.0
    cpu_wait_s: float | None = None
    idle_s: float = 0.0
    process_cpu_s: float = 0.0
    read_bytes: int | None = None
    reads: int | None = None
    pss_bytes: int | None = None
    memory: tuple[MemoryReading, ...] = ()
    cpus: tuple[int, ...] | None = None
    lines: tuple[HotLine, ...] = ()
    first_lines: tuple[HotLine, ...] = ()
    data: StorageReading | None = None


class WorkerSocket:
    """The recorder's end of a nameless pair of sockets: only the workers that inherit the other end can write to it."""

    def __init__(self) -> None:
        self._receiving: socket.socket | None = None
        self._sending: socket.socket | None = None

    def opened(self) -> socket.socket | None:
        """The end for workers, made when the first ones start; None where the system has no such sockets."""
        if self._sending is None:
            with contextlib.suppress(OSError):
                self._receiving, self._sending = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._receiving.setblocking(False)
                self._sending.setblocking(False)
                self._sending.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, QUEUE_BYTES)
        return self._sending

    def receive(self) -> Iterator[WorkerMessage]:
        """The messages that have arrived since the last call."""
        while self._receiving is not None:
            try:
                data = self._receiving.recv(LARGEST_DATAGRAM)
            except OSError:  # mostly: nothing has arrived
                return
            yield pickle.loads(data)  # only the job's own processes can have sent it


# Seconds of the fetching thread: wall time, CPU time, and waiting for a CPU (0.0 where unknown).
Clocks = tuple[float, float, float]


def _plus(spent: Clocks, began: Clocks, ended: Clocks) -> Clocks:
    return spent[0] + ended[0] - began[0], spent[1] + ended[1] - began[1], spent[2] + ended[2] - began[2]


class FetchTimer:
    """Adds up what this worker's fetches cost, and sends it to the recorder."""

    def __init__(self, sending: socket.socket, loader_id: int, in_pass: int = 0) -> None:
        self._socket = sending
        self._message = WorkerMessage(loader_id, os.getpid(), in_pass)
        self._lines, self._first_lines = LineTimes(), LineTimes()
        self._began_s = self._last_sample = time.perf_counter()
        self._cpu_before_s = time.process_time()
        self.thread_id = threading.get_ident()
        self._thread_native = threading.get_native_id()
        self._cpu_clock = cpu_clock(self._thread_native)
        self._thread_before_s = time.clock_gettime(self._cpu_clock)
        self._beside: dict[int, float] = {}  # CPU time of threads that do not fetch, by their native number
        self._under_way: Clocks | None = None  # when the fetch under way began
        self._spent: Clocks = (0.0, 0.0, 0.0)
        self._sent = 0
        self._files = FilesRead()
        self._before_pass: Clocks | None = None  # spent until then, while the first batch of a pass is to come

    def begin_pass(self, original: Callable[..., None], *args: Any) -> None:
        """Make torch's fetcher for a pass, which asks an iterable data set for its iterator: a part of fetching."""
        self._before_pass = self._spent
        self._measured(original, *args)

    def fetch(self, original: Callable[..., Any], *args: Any) -> Any:
        """One fetch, measured."""
        batch = self._measured(original, *args)
        message = self._message
        message.batches += 1
        if self._before_pass is not None:
            first_s, first_cpu_s, first_wait_s = _plus((0.0, 0.0, 0.0), self._before_pass, self._spent)
            message.first_batches += 1
            message.first_fetch_s += first_s
            message.first_fetch_cpu_s += first_cpu_s
            message.first_cpu_wait_s += first_wait_s
            self._before_pass = None
        return batch

    def _measured(self, original: Callable[..., Any], *args: Any) -> Any:
        began = self._under_way = self._clocks()
        try:
            return original(*args)
        finally:
            self._spent, self._under_way = _plus(self._spent, began, self._clocks()), None

    def _clocks(self) -> Clocks:
        _, waited_s = cpu_times_s(self._thread_native) or (0.0, 0.0)
        return time.perf_counter(), time.clock_gettime(self._cpu_clock), waited_s

    def observe(self, stop: threading.Event) -> None:
        """Sample the worker's stack; runs on a thread of its own."""
        wake_on_time()
        switch_interval = SwitchInterval()
        switch_interval.apply()
        switch_interval.begin_wait(self._cpu_clock)
        self._beside[threading.get_native_id()] = 0.0
        next_send = time.perf_counter() + SEND_EVERY_S
        jitter = Random()  # our own: the job's random numbers are the job's
        sampled, every_s = 0, EARLY_SAMPLE_EVERY_S
        while not stop.wait(every_s * (0.5 + jitter.random())):
            switch_interval.end_wait()
            now = time.perf_counter()
            since, self._last_sample = now - self._last_sample, now
            try:
                if self._under_way and (stack := stack_of(self.thread_id)) is not None:
                    sampled += 1
                    view = view_of(stack, FetchTimer._measured.__code__)
                    if view is not None:
                        self._lines.add(view, min(since, 5 * every_s))
                        if self._before_pass is not None:
                            self._first_lines.add(view, min(since, 5 * every_s))
                    self._files.sample()
                if now >= next_send:
                    next_send = now + (SEND_EVERY_S if self._sent < EARLY_MESSAGES else LATER_SEND_EVERY_S)
                    switch_interval.apply()
                    self.send()
            except Exception:  # no error of Fulltilt's may end or disturb the user's worker
                if os.environ.get("FULLTILT_DEBUG"):
                    raise
            every_s = switch_interval.every_s(EARLY_SAMPLE_EVERY_S if sampled < EARLY_SAMPLES else SAMPLE_EVERY_S)
            switch_interval.begin_wait(self._cpu_clock)

    def _helpers_cpu_s(self) -> float:
        """CPU time of threads that do a part of the fetching for it, as those of zarr, OpenCV or PyArrow do."""
        for thread in threading.enumerate():  # torch's queue pickles and sends batches on a thread
            if thread.name == "QueueFeederThread" and thread.native_id:
                self._beside.setdefault(thread.native_id, 0.0)
        for thread_number, before_s in self._beside.items():
            self._beside[thread_number] = cpu_s(cpu_clock(thread_number)) or before_s  # it may have ended
        own_s = time.clock_gettime(self._cpu_clock) - self._thread_before_s
        return max(time.process_time() - self._cpu_before_s - own_s - sum(self._beside.values()), 0.0)

    def _read_memory(self) -> None:
        """Read the memory whenever the number of messages has doubled: the kernel walks all pages for it."""
        self._sent += 1
        if self._sent & (self._sent - 1):
            return
        from fulltilt.probes.host import page_totals, proportional_bytes

        message = self._message
        message.pss_bytes = max(proportional_bytes(message.pid), message.pss_bytes or 0)
        with contextlib.suppress(OSError, KeyError):
            pages = page_totals(message.pid)
            private = pages["Private_Clean"] + pages["Private_Dirty"]
            reading = MemoryReading(time.monotonic(), private, pages["Rss"] - private, message.batches)
            message.memory = (*message.memory[-2:], reading)

    def send(self) -> None:
        """Send what happened so far, with the fetch under way, which may never end."""
        self._read_memory()
        spent, under_way = self._spent, self._under_way  # in this order: a fetch that ends meanwhile counts once
        if under_way is not None:
            spent = _plus(spent, under_way, self._clocks())
        message = self._message
        message.fetch_s, message.fetch_cpu_s, waited_s = spent
        message.fetch_cpu_s += self._helpers_cpu_s()
        message.cpu_wait_s = None if cpu_times_s(self._thread_native) is None else waited_s
        message.idle_s = max(0.0, time.perf_counter() - self._began_s - message.fetch_s)
        message.process_cpu_s = time.process_time() - self._cpu_before_s
        message.read_bytes, message.reads = _read_so_far()
        message.cpus = allowed_cpus()
        message.lines, message.first_lines = self._lines.take(), self._first_lines.take()
        message.data = self._files.take()
        with contextlib.suppress(OSError):
            self._socket.send(pickle.dumps(message))


class FilesRead:
    """Finds the storage of the files that this worker reads, by those that it has open now and then."""

    def __init__(self) -> None:
        self._folders: list[str] = []
        self._samples_left = FILE_SAMPLES

    def sample(self) -> None:
        """Note the folders of the files that are open now."""
        if not self._samples_left:
            return
        import psutil

        self._samples_left -= 1
        with contextlib.suppress(OSError, psutil.Error):
            read = [file.path for file in psutil.Process().open_files() if getattr(file, "mode", "") == "r"]
            self._folders += {str(Path(path).parent) for path in read if not path.startswith(NO_DATA)}

    def take(self) -> StorageReading | None:
        """The storage of the files, once; None as long as too few were seen, and afterwards."""
        if not self._folders or (self._samples_left and len(self._folders) < ENOUGH_FILES):
            return None
        self._samples_left = 0
        from fulltilt.probes.storage import place_of

        shared, common = os.path.commonpath(self._folders), Counter(self._folders).most_common(1)[0][0]
        self._folders = []
        with contextlib.suppress(Exception):  # what cannot be found is left out
            return place_of(shared if shared != os.path.sep else common)
        return None


def _read_so_far() -> tuple[int | None, int | None]:
    """Bytes that this process has read from storage, and its calls to read; None where unknown."""
    try:
        with open("/proc/self/io", encoding="ascii") as file:  # noqa: PTH123 - small and plain
            totals = dict(line.split() for line in file)
        return int(totals["read_bytes:"]), int(totals["syscr:"])
    except (OSError, ValueError, KeyError):
        return None, None


def allowed_cpus() -> tuple[int, ...]:
    """The CPUs that the main thread of this process may run on."""
    return tuple(sorted(os.sched_getaffinity(os.getpid())))


def run_worker(sending: socket.socket, loader_id: int, in_pass: int, home: str, *args: Any) -> None:
    """Run the worker loop of ``home`` with a timer around each fetch; just the loop where that fails."""
    original = plain_loops.get(home) or importlib.import_module(home)._worker_loop
    if process_recorder is not None:
        process_recorder.active = False
    try:
        timer = FetchTimer(sending, loader_id, in_pass)
        stop = threading.Event()
        _measure_fetches(timer)
        threading.Thread(target=timer.observe, args=(stop,), name="fulltilt-worker", daemon=True).start()
    except Exception:
        original(*args)
        return
    try:
        original(*args)
    finally:
        stop.set()
        timer.send()


def _measure_fetches(timer: FetchTimer) -> None:
    from torch._utils import ExceptionWrapper
    from torch.utils.data._utils import fetch as fetchers

    wrapper: Any = ExceptionWrapper
    wraps = wrapper.__init__

    def wrap(self: Any, *args: Any, **kwargs: Any) -> None:
        leave_out_ours(sys.exc_info()[1])  # torch writes the traceback down for the training process
        wraps(self, *args, **kwargs)

    wrapper.__init__ = wrap

    kinds: list[Any] = [fetchers._MapDatasetFetcher, fetchers._IterableDatasetFetcher]
    for kind in kinds:
        unmeasured = kind.fetch

        def fetch(self: Any, index: Any, _unmeasured: Callable[..., Any] = unmeasured) -> Any:
            return timer.fetch(_unmeasured, self, index)

        kind.fetch = fetch
        begins = kind.__init__

        def begin(self: Any, *args: Any, _begins: Callable[..., None] = begins, **kwargs: Any) -> None:
            timer.begin_pass(partial(_begins, **kwargs), self, *args)

        kind.__init__ = begin


# How many workers' last messages are kept. A job that starts new workers for each pass has very many of them, and pids
# are used again.
MOST_WORKERS = 512
SUMMED = (
    *("batches", "fetch_s", "fetch_cpu_s", "cpu_wait_s", "idle_s", "process_cpu_s", "read_bytes", "reads"),
    *("first_batches", "first_fetch_s", "first_fetch_cpu_s", "first_cpu_wait_s"),
)


class WorkerTotals:
    """The workers of one loader so far: sums over all of them, and the last message of each."""

    def __init__(self) -> None:
        # By pid and the pass in which the worker began, in the order of arrival; ``in_pass`` is that of the arrival.
        self.last: dict[tuple[int, int], WorkerMessage] = {}
        self._processes = 0
        self._sums: dict[str, Any] = {**dict.fromkeys(SUMMED), "batches": 0}
        self._read_in_pass: dict[int, int] = {}
        self._data: StorageReading | None = None
        self._lines, self._first_lines = LineTimes(), LineTimes()
        self._growth = LineGrowth(self._lines)

    def add(self, message: WorkerMessage, arrives_in_pass: int) -> None:
        """Add a worker's message. What it read counts for the pass in which its message before arrived."""
        key = message.pid, message.in_pass
        before = self.last.pop(key, None)
        in_pass = (before or message).in_pass
        self._processes += before is None
        fresh = {name: _difference(getattr(message, name), getattr(before, name, None)) for name in SUMMED}
        for name, figure in fresh.items():
            if figure is not None:
                self._sums[name] = (self._sums[name] or 0) + figure
        read = fresh["read_bytes"]
        if read is not None and (in_pass in self._read_in_pass or len(self._read_in_pass) < MOST_PASSES):
            self._read_in_pass[in_pass] = self._read_in_pass.get(in_pass, 0) + int(read)
        self._data = self._data or message.data
        self._lines.merge(message.lines)
        self._first_lines.merge(message.first_lines)
        self._growth.note(self._sums["batches"])
        self.last[key] = replace(message, lines=(), first_lines=(), in_pass=arrives_in_pass)
        if len(self.last) > MOST_WORKERS:
            del self.last[next(iter(self.last))]

    def record(self, loader_id: int) -> WorkerRecord:
        """The totals as a record."""
        last = self.last.values()
        pss_bytes = [one.pss_bytes for one in last if one.pss_bytes is not None]
        cpus = [one.cpus for one in last if one.cpus is not None]
        return WorkerRecord(
            loader_id=loader_id,
            processes=self._processes,
            **self._sums,
            lines=self._lines.top(),
            first_lines=self._first_lines.top(),
            growing_lines=self._growth.top(self._sums["batches"]),
            pss_bytes=round(statistics.mean(pss_bytes)) if pss_bytes else None,
            read_bytes_by_pass=tuple(size for _, size in sorted(self._read_in_pass.items())),
            cpus=len(set().union(*cpus)) if cpus else None,
            growth=self._memory_growth(),
            data=self._data,
        )

    def _memory_growth(self) -> MemoryGrowthRecord | None:
        """How private memory grew in the later half of the workers' lives; None where it did not, or ever less."""
        grown = []
        for message in self.last.values():
            if len(message.memory) == 3:
                first, middle, last = message.memory
                # What is only filled at the beginning (imports, buffers) grows ever more slowly.
                earlier = (middle.private_bytes - first.private_bytes) / max(middle.at_s - first.at_s, 1e-9)
                size, over_s = last.private_bytes - middle.private_bytes, last.at_s - middle.at_s
                if size <= 0 or size / max(over_s, 1e-9) < STEADY * earlier:
                    size = 0
                # Pages shared with the parent become the worker's own when they are written.
                copied = max(middle.shared_bytes - last.shared_bytes, 0)
                grown.append((over_s, size, last.batches - middle.batches, copied, last.shared_bytes))
        if not any(size for _, size, *_ in grown):
            return None
        over_s, size, batches, copied, shared = (statistics.mean(column) for column in zip(*grown, strict=True))
        return MemoryGrowthRecord(round(size), over_s, batches, round(min(copied, size)), round(shared))


def _difference(now: float | None, before: float | None) -> float | None:
    """What a worker has done since its message before; None where unknown."""
    return None if now is None else now - (before or 0)
