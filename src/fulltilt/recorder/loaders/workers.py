"""Inside a loader worker: what fetching costs, in CPU and in waiting, and on which lines.

The training process replaces torch's worker loop by :func:`run_worker`, which runs the original loop with a clock
around each fetch and a light stack sampler beside it. Figures go to the recorder in datagrams, two a second, through a
socket that only workers inherit: no file, no name, no lock, and a worker that dies loses at most its last moment.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from random import Random
from typing import Any

from fulltilt import store
from fulltilt.recorder.interpreter_lock import LockTurns, cpu_times_s, own_cpu_clock, wake_on_time
from fulltilt.recorder.stacks.frames import LineGrowth, LineTimes, stack_of, view_of
from fulltilt.recorder.user_code import leave_out_ours
from fulltilt.records import HotLine, MemoryGrowthRecord, StorageReading, WorkerRecord

# A stack sample costs the worker 0.4 ms: often at first, so that short jobs have their lines, then rarely.
EARLY_SAMPLES, EARLY_SAMPLE_EVERY_S = 500, 0.02
SAMPLE_EVERY_S = 0.1
SEND_EVERY_S = 0.5
LARGEST_DATAGRAM = 65_536
QUEUE_BYTES = 1 << 20  # what many workers that end together tell at once
MOST_PASSES = 16  # whose reads are told apart
STEADY = 0.5  # growth is steady where its rate has not fallen by more than half
# Where a worker's files lie is told when so many have been seen, or after so many looks.
ENOUGH_FILES, LOOKS_FOR_FILES = 8, 100
NO_DATA = ("/proc/", "/sys/", sys.prefix, sys.base_prefix)
LARGEST_FIGURE = 1 << 60  # more bytes, batches or seconds than any job has; NaN is not below it either

# The worker loops by the module that holds them. A forked worker inherits them from here; a spawned one imports them.
plain_loops: dict[str, Callable[..., None]] = {}


def home_of_loop(module: str) -> Any:
    """The module in which iterators of this one find the loop of their workers: torch's, unless they have their own."""
    own = sys.modules.get(module)
    return own if hasattr(own, "_worker_loop") else importlib.import_module("torch.utils.data._utils.worker")


@dataclass(frozen=True)
class WorkerMessage:
    """What one worker did since its last message.

    ``read_bytes`` (from storage) and ``reads`` (calls, of whatever) are totals, ``pss_bytes``, ``private_bytes``
    and ``shared_bytes`` levels; ``cpus`` are those that it may run on. ``data`` is told once: where its files lie.
    """

    loader: int
    pid: int
    batches: int
    fetch_s: float
    fetch_cpu_s: float
    cpu_wait_s: float | None
    idle_s: float
    process_cpu_s: float
    read_bytes: int | None
    pss_bytes: int | None
    reads: int | None
    private_bytes: int | None
    shared_bytes: int | None
    cpus: tuple[int, ...] | None
    lines: tuple[HotLine, ...]
    data: StorageReading | None = None
    in_pass: int = 0  # when it began


class Mailbox:
    """The recorder's end of a nameless pair of sockets: only the workers that inherit the other end can write to it."""

    def __init__(self) -> None:
        self._receiving: socket.socket | None = None
        self._sending: socket.socket | None = None

    def opened(self) -> socket.socket | None:
        """The end for workers, made when the first ones start; None where the system has no such sockets."""
        if self._sending is None and hasattr(socket, "AF_UNIX"):
            with contextlib.suppress(OSError):
                self._receiving, self._sending = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._receiving.setblocking(False)
                self._sending.setblocking(False)
                self._sending.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, QUEUE_BYTES)
        return self._sending

    def receive(self) -> Iterator[WorkerMessage]:
        """The messages that have arrived since the last call. What is no message of a worker is dropped."""
        while self._receiving is not None:
            try:
                data = self._receiving.recv(LARGEST_DATAGRAM)
            except (BlockingIOError, InterruptedError, OSError):
                return
            if (message := checked(data)) is not None:
                yield message


def checked(data: bytes) -> WorkerMessage | None:
    """The message that ``data`` holds; None unless every field has its type and a value that a worker can have."""
    try:
        message = store.decode(WorkerMessage, json.loads(data))
    except (ValueError, RecursionError):
        return None
    told = [getattr(message, field.name) for field in fields(message)]
    figures = [figure for figure in told if isinstance(figure, int | float)]
    figures += [*(message.cpus or ()), *(line.seconds for line in message.lines)]
    return message if all(0 <= figure < LARGEST_FIGURE for figure in figures) else None


# Seconds of the fetching thread: on the wall, of the CPU, and in the CPU's queue (0.0 where nobody says).
Clocks = tuple[float, float, float]


class FetchMeter:
    """Adds up what this worker's fetches cost and sends it off now and then."""

    def __init__(self, mailbox: socket.socket, loader_id: int, in_pass: int = 0) -> None:
        self._socket = mailbox
        self._loader_id, self._in_pass = loader_id, in_pass
        self._lines = LineTimes()
        self._began = time.perf_counter()
        self._process_cpu = time.process_time()
        self._last_sample = time.perf_counter()
        self.thread_id = threading.get_ident()
        self._cpu_clock = own_cpu_clock()  # without one, other threads cannot tell what a fetch under way has cost
        self._thread_native = threading.get_native_id()
        self.fetching = False
        self._sent = 0
        self._counting = threading.Lock()  # fetches go on while a message is made
        self._since = self._spent = (0.0, 0.0, 0.0)
        self._batches = 0
        self._files = FilesRead()

    def fetch(self, original: Callable[..., Any], *args: Any) -> Any:
        """One fetch, measured."""
        self._since = self._clocks()
        self.fetching = True
        batches = 0
        try:
            batch = original(*args)
            batches = 1
            return batch
        finally:
            with self._counting:
                self.fetching = False
                self._book(batches)

    def _book(self, batches: int) -> None:
        """Count the fetch under way up to now. One that never ends is told of all the same."""
        (wall_s, cpu_s, delay_s), (wall0_s, cpu0_s, delay0_s) = self._clocks(), self._since
        self._since = wall_s, cpu_s, delay_s
        fetch_s, fetch_cpu_s, waited_s = self._spent
        self._spent = fetch_s + wall_s - wall0_s, fetch_cpu_s + cpu_s - cpu0_s, waited_s + delay_s - delay0_s
        self._batches += batches

    def _clocks(self) -> Clocks:
        cpu_s = time.thread_time() if self._cpu_clock is None else time.clock_gettime(self._cpu_clock)
        return time.perf_counter(), cpu_s, run_delay_s(self._thread_native) or 0.0

    def observe(self, stop: threading.Event) -> None:
        """The sampler beside the loop, on a thread of its own."""
        wake_on_time()
        lock_turns = LockTurns()
        lock_turns.share()
        lock_turns.begin_wait(self._cpu_clock)
        next_send = time.perf_counter() + SEND_EVERY_S
        jitter = Random()  # our own: the job's random numbers are the job's
        sampled, every_s = 0, EARLY_SAMPLE_EVERY_S
        while not stop.wait(every_s * (0.5 + jitter.random())):
            lock_turns.end_wait()
            now = time.perf_counter()
            since, self._last_sample = now - self._last_sample, now
            if self.fetching and (stack := stack_of(self.thread_id)) is not None:
                view = view_of(stack, FetchMeter.fetch.__code__)
                if view is not None:
                    self._lines.add(view, min(since, 5 * every_s))
                sampled += 1
                self._files.look()
            every_s = lock_turns.every_s(EARLY_SAMPLE_EVERY_S if sampled < EARLY_SAMPLES else SAMPLE_EVERY_S)
            if now >= next_send:
                next_send = now + SEND_EVERY_S
                lock_turns.share()
                self.send()
            lock_turns.begin_wait(self._cpu_clock)

    def _memory(self) -> tuple[int | None, int | None, int | None]:
        """Memory of this worker, its private and its shared part, asked for at every doubling of its messages.

        The kernel walks all pages for it.
        """
        self._sent += 1
        if self._sent & (self._sent - 1):
            return None, None, None
        from fulltilt.probes.host import page_totals, proportional_bytes

        try:
            pages = page_totals(os.getpid())
            private = pages["Private_Clean"] + pages["Private_Dirty"]
            return pages["Pss"], private, pages["Rss"] - private
        except (OSError, KeyError):
            return proportional_bytes(os.getpid()), None, None

    def send(self) -> None:
        """Tell the recorder what happened since the last message."""
        pss_bytes, private_bytes, shared_bytes = self._memory()
        (read_bytes, reads), lines = _read_so_far(), self._lines.take()
        with self._counting:
            if self.fetching and self._cpu_clock is not None:
                self._book(batches=0)
            batches, (fetch_s, fetch_cpu_s, waited_s) = self._batches, self._spent
            self._batches, self._spent = 0, (0.0, 0.0, 0.0)
            now, cpu = time.perf_counter(), time.process_time()
            alive, self._began = now - self._began, now
            process_cpu, self._process_cpu = cpu - self._process_cpu, cpu
        message = WorkerMessage(
            loader=self._loader_id,
            pid=os.getpid(),
            batches=batches,
            fetch_s=fetch_s,
            fetch_cpu_s=max(0.0, fetch_cpu_s),
            cpu_wait_s=waited_s if run_delay_s(self._thread_native) is not None else None,
            idle_s=max(0.0, alive - fetch_s),
            process_cpu_s=process_cpu,
            read_bytes=read_bytes,
            pss_bytes=pss_bytes,
            reads=reads,
            private_bytes=private_bytes,
            shared_bytes=shared_bytes,
            cpus=allowed_cpus() if pss_bytes is not None else None,
            lines=lines,
            data=self._files.take(),
            in_pass=self._in_pass,
        )
        with contextlib.suppress(OSError):
            self._socket.send(json.dumps(store.encode(message), separators=(",", ":")).encode())


class FilesRead:
    """Finds out where the files lie that this worker reads: which it has open for reading when it is looked at."""

    def __init__(self) -> None:
        self._folders: list[str] = []
        self._looks = LOOKS_FOR_FILES

    def look(self) -> None:
        """See what is open now."""
        if not self._looks:
            return
        import psutil

        self._looks -= 1
        with contextlib.suppress(OSError, psutil.Error):
            read = [file.path for file in psutil.Process().open_files() if getattr(file, "mode", "") == "r"]
            self._folders += {str(Path(path).parent) for path in read if not path.startswith(NO_DATA)}

    def take(self) -> StorageReading | None:
        """What the files lie on; None where none was seen yet, and once it has been told."""
        if not self._folders or (self._looks and len(self._folders) < ENOUGH_FILES):
            return None
        self._looks = 0
        from fulltilt.probes.storage import place_of

        shared, common = os.path.commonpath(self._folders), Counter(self._folders).most_common(1)[0][0]
        self._folders = []
        with contextlib.suppress(Exception):  # the worker is the user's: what cannot be told is left out
            return place_of(shared if shared != os.path.sep else common)
        return None


def _read_so_far() -> tuple[int | None, int | None]:
    """Bytes that this process has had to fetch from storage, and its calls to read; None where nobody says."""
    try:
        with open("/proc/self/io", encoding="ascii") as file:  # noqa: PTH123 - small and plain
            totals = dict(line.split() for line in file)
        return int(totals["read_bytes:"]), int(totals["syscr:"])
    except (OSError, ValueError, KeyError):
        return None, None


def run_delay_s(thread: int) -> float | None:
    """Seconds that a thread of this process was ready to run and waited for a CPU; None where nobody says."""
    times = cpu_times_s(thread)
    return None if times is None else times[1]


def allowed_cpus() -> tuple[int, ...] | None:
    """The CPUs that the main thread of this process may run on; None where the system does not bind."""
    try:
        return tuple(sorted(os.sched_getaffinity(os.getpid())))
    except (AttributeError, OSError):
        return None


def run_worker(mailbox: socket.socket, loader_id: int, in_pass: int, home: str, *args: Any) -> None:
    """The worker loop of ``home`` with a meter around each fetch. A meter that fails leaves the loop as it is."""
    from fulltilt.recorder import attach

    original = plain_loops.get(home) or importlib.import_module(home)._worker_loop
    if attach.current is not None:
        attach.current.recorder.active = False  # a spawned worker attached itself like any Python process
    try:
        meter = FetchMeter(mailbox, loader_id, in_pass)
        stop = threading.Event()
        _measure_fetches(meter)
        threading.Thread(target=meter.observe, args=(stop,), name="fulltilt-worker", daemon=True).start()
    except Exception:
        original(*args)
        return
    try:
        original(*args)
    finally:
        stop.set()
        meter.send()


def _measure_fetches(meter: FetchMeter) -> None:
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
            return meter.fetch(_unmeasured, self, index)

        kind.fetch = fetch


@dataclass
class WorkerTotals:
    """What the workers of one loader told so far."""

    pids: set[int] = field(default_factory=set)
    batches: int = 0
    fetch_s: float = 0.0
    fetch_cpu_s: float = 0.0
    cpu_wait_s: float | None = 0.0
    idle_s: float = 0.0
    process_cpu_s: float = 0.0
    read_bytes: dict[int, int] = field(default_factory=dict)
    pss_bytes: dict[int, int] = field(default_factory=dict)
    reads: dict[int, int] = field(default_factory=dict)
    cpus: dict[int, tuple[int, ...]] = field(default_factory=dict)
    # When memory was asked for, how much was private and how much shared, and the batches up to then, by worker; the
    # last three.
    memory: dict[int, list[tuple[float, int, int, int]]] = field(default_factory=dict)
    read_in_pass: dict[int, int] = field(default_factory=dict)
    data: StorageReading | None = None
    _batches_of: Counter[int] = field(default_factory=Counter)
    lines: LineTimes = field(default_factory=LineTimes)
    growth: LineGrowth = field(init=False)

    def __post_init__(self) -> None:
        self.growth = LineGrowth(self.lines)

    def add(self, message: WorkerMessage, in_pass: int = 0) -> None:
        """Take one message of a worker, which came in this pass."""
        self.pids.add(message.pid)
        self.batches += message.batches
        self.fetch_s += message.fetch_s
        self.fetch_cpu_s += message.fetch_cpu_s
        self.idle_s += message.idle_s
        self.process_cpu_s += message.process_cpu_s
        waited = message.cpu_wait_s
        self.cpu_wait_s = None if waited is None or self.cpu_wait_s is None else self.cpu_wait_s + waited
        self._batches_of[message.pid] += message.batches
        if message.reads is not None:
            self.reads[message.pid] = message.reads
        self.data = self.data or message.data
        if message.cpus is not None:
            self.cpus[message.pid] = message.cpus
        if message.private_bytes is not None:
            readings = self.memory.setdefault(message.pid, [])
            levels = message.private_bytes, message.shared_bytes or 0
            readings.append((time.monotonic(), *levels, self._batches_of[message.pid]))
            del readings[:-3]
        if message.read_bytes is not None:
            fresh = message.read_bytes - self.read_bytes.get(message.pid, 0)
            if in_pass in self.read_in_pass or len(self.read_in_pass) < MOST_PASSES:
                self.read_in_pass[in_pass] = self.read_in_pass.get(in_pass, 0) + fresh
            self.read_bytes[message.pid] = message.read_bytes
        if message.pss_bytes is not None:
            self.pss_bytes[message.pid] = max(message.pss_bytes, self.pss_bytes.get(message.pid, 0))
        self.lines.merge(message.lines)
        self.growth.note(self.batches)

    def record(self, loader_id: int) -> WorkerRecord:
        """The totals as a record."""
        return WorkerRecord(
            loader_id=loader_id,
            processes=len(self.pids),
            batches=self.batches,
            fetch_s=self.fetch_s,
            fetch_cpu_s=self.fetch_cpu_s,
            cpu_wait_s=self.cpu_wait_s,
            idle_s=self.idle_s,
            process_cpu_s=self.process_cpu_s,
            read_bytes=sum(self.read_bytes.values()) if self.read_bytes else None,
            lines=self.lines.top(),
            growing_lines=self.growth.top(self.batches),
            pss_bytes=round(statistics.mean(self.pss_bytes.values())) if self.pss_bytes else None,
            reads=sum(self.reads.values()) if self.reads else None,
            read_bytes_by_pass=tuple(size for _, size in sorted(self.read_in_pass.items())),
            cpus=len(set().union(*self.cpus.values())) if self.cpus else None,
            growth=self._memory_growth(),
            data=self.data,
        )

    def _memory_growth(self) -> MemoryGrowthRecord | None:
        """How private memory grew in the later half of the workers' lives; None where it did not, or falls off."""
        grown = []
        for readings in self.memory.values():
            if len(readings) == 3:
                (t0, first, *_), (t1, before, shared, batches), (t2, last, shared_later, batches_later) = readings
                # What is only filled in the beginning (imports, buffers) grows ever slower.
                earlier, later = (before - first) / max(t1 - t0, 1e-9), (last - before) / max(t2 - t1, 1e-9)
                size = last - before if later > 0 and later >= STEADY * earlier else 0
                # Pages that were the parent's, too, and are written to become the worker's own.
                grown.append((t2 - t1, size, batches_later - batches, max(shared - shared_later, 0), shared_later))
        if not any(size for _, size, *_ in grown):
            return None
        over_s, size, batches, copied, shared = (statistics.mean(column) for column in zip(*grown, strict=True))
        return MemoryGrowthRecord(round(size), over_s, batches, round(min(copied, size)), round(shared))
