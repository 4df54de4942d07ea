"""Before other workers take over, two of them make batches again that the script has had: are they the same?

Each batch is made three times. Where these differ among each other, the data set draws random numbers; where they agree
and the script had something else, it does otherwise in a worker, and the loader is left alone.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import random
import sys
import threading
import types
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from fulltilt.recorder.loaders.batches import count_bytes
from fulltilt.tuning.live.history import short
from fulltilt.tuning.live.index_queue import IndexQueue
from fulltilt.tuning.live.worker_pool import WorkerPool

# What is rounded differently with one thread comes out the same now and then.
MOST_BATCHES = 3
MOST_BYTES = 256 << 20
CHECKING_WORKERS = 2
TIMES = 3
# Batches are nested less deeply than this.
DEEPEST = 12
# Of a data set's own state; pickling more would take longer than a step.
MOST_STATE_BYTES = 32 << 20
LARGE_ARRAY_BYTES = 1 << 20


class BatchCheck:
    """Collects batches of the script's, then has them made again. ``verdict``: same, random, or why to leave it alone.

    ``serial``: the training process makes the batches itself. Then its generators, its open files and the state of its
    data set are looked at, too, before there are any workers that could share them.
    """

    def __init__(self, dataset: Any, collate: Any, serial: bool) -> None:
        self.verdict: str | None = None
        self.tensors_per_batch = 0
        self._makers = (dataset, collate)
        self._serial = serial
        self._wanted: list[tuple[Any, Any]] = []
        self._bytes = 0
        self._is_random = False
        self._before: tuple[Any, ...] = ()
        self._state: int | None = None
        self._pool: WorkerPool | None = None
        self._found: str | None = None

    SAME, RANDOM = "same", "random"

    # ------------------------------------------------------------------ collecting

    @property
    def is_collecting(self) -> bool:
        """Whether more batches are wanted."""
        enough = len(self._wanted) >= MOST_BATCHES or self._bytes >= MOST_BYTES
        return self._pool is None and self.verdict is None and not enough

    @property
    def has_begun(self) -> bool:
        """Whether workers make them again, or that is over."""
        return self._pool is not None or self.verdict is not None

    @property
    def has_some(self) -> bool:
        """Whether there is at least one batch to compare."""
        return bool(self._wanted)

    def begin_pass(self) -> None:
        """The script may change its data set between two passes."""
        if self._pool is None:
            self._wanted, self._bytes, self._state = [], 0, None

    def about_to_fetch(self) -> None:
        """The script's next batch is made."""
        if self._serial:
            if self._state is None:
                self._look_at_data_set()
            self._before = (_generators_now(), _file_positions())

    def fetched(self, indices: Any, batch: Any) -> None:
        """It was made: keep a copy, since training may change the batch itself."""
        if self._before:
            generators, positions = self._before
            self._is_random = self._is_random or generators != _generators_now()
            if _moved(positions, _file_positions()):
                self.verdict = "its data set reads from a file that stays open, whose position workers would share"
        pickler = _Pickler(is_batch=True)
        problem = pickler.problem_of(batch) or pickler.unusual
        if problem is not None and self._serial:
            self.verdict = f"its batches cannot be handed over by a worker ({problem})"
        self.tensors_per_batch = max(self.tensors_per_batch, pickler.tensors)
        if self.verdict is None:
            self._bytes += count_bytes(batch)
            self._wanted.append((copy.deepcopy(indices), copy.deepcopy(batch)))

    def _look_at_data_set(self) -> None:
        pickler = _Pickler(is_batch=False)
        problem = pickler.problem_of(self._makers)
        if problem is not None:
            self.verdict = f"its data set holds what a worker cannot share ({problem})"
        elif self._state is not None and pickler.digest != self._state:
            self.verdict = (
                "what its data set holds changes as it is read, and workers would not see each other's changes"
            )
        self._state = pickler.digest

    # ------------------------------------------------------------------ comparing

    def begin(self, make: Callable[[int], WorkerPool]) -> None:
        """Have workers make the batches again, beside the training."""
        if self._serial:
            self._look_at_data_set()
        if self.verdict is None:
            try:
                self._pool = make(CHECKING_WORKERS)
                self._pool.start(self._compare)
            except Exception as error:
                self.verdict = f"workers cannot be started ({short(error)})"

    def poll(self) -> None:
        """Take note of what has come out by now."""
        if self.verdict is not None or self._pool is None:
            return
        try:
            if self._pool.is_ready():
                self.verdict = self.RANDOM if self._is_random else self._found or self.SAME
        except Exception as error:
            self.verdict = f"a worker cannot make its batches ({short(error)})"

    def end(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.retire()
        self._wanted = []

    def _compare(self, pool: WorkerPool) -> None:
        pool.serve(IndexQueue(iter([indices for indices, _ in self._wanted for _ in range(TIMES)])))
        for _, wanted in self._wanted:
            first, *others = [pool.draw()[1] for _ in range(TIMES)]
            agree = [is_same(first, other) for other in others]
            if not all(agree):
                self._is_random = True
            elif is_same(wanted, first) is False:
                self._found = "its batches come out different in a worker"


def is_same(ours: Any, theirs: Any, depth: int = DEEPEST) -> bool | None:
    """Whether two batches hold the same numbers, bit for bit; None where that cannot be told."""
    numpy = sys.modules.get("numpy")
    if ours is theirs:
        return True
    if type(ours) is not type(theirs):
        return False
    if depth == 0:
        return None
    if isinstance(ours, torch.Tensor) and ours.layout == torch.strided and not ours.is_quantized:
        return _same_tensor(ours, theirs)
    if numpy is not None and isinstance(ours, numpy.ndarray) and not ours.dtype.hasobject:
        return (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape) and ours.tobytes() == theirs.tobytes()
    try:
        if isinstance(ours, Mapping):
            ours, theirs = ([part for pair in mapping.items() for part in pair] for mapping in (ours, theirs))
        if isinstance(ours, list | tuple):
            pairs = zip(ours, theirs, strict=False)
            return len(ours) == len(theirs) and _all(is_same(*pair, depth - 1) for pair in pairs)
        same = is_same(vars(ours), vars(theirs), depth - 1) if hasattr(ours, "__dict__") else None
        return pickle.dumps(ours) == pickle.dumps(theirs) if same is None else same
    except Exception:  # objects of the user's may answer anything, and fail at it
        return None


def _all(answers: Iterable[bool | None]) -> bool | None:
    found = list(answers)
    return False if False in found else None if None in found else True


def _same_tensor(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return False
    return torch.equal(*(tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in (ours, theirs)))


# ---------------------------------------------------------------------- what a fetch depends on


class _Enough(Exception):  # noqa: N818 - it says what happened
    pass


class _Pickler(pickle.Pickler):
    """Pickles to nowhere, which finds what no other process can have: open files, connections, pools of threads.

    Of a batch everything but its tensors is pickled as a worker would. Of a data set, large data, code and random
    generators are left out, since forked workers have them anyway; ``digest`` changes when the rest does.
    """

    def __init__(self, is_batch: bool) -> None:
        self._sink = _Digest()
        super().__init__(self._sink, protocol=pickle.HIGHEST_PROTOCOL)
        self._is_batch = is_batch
        self.tensors = 0
        self.unusual: str | None = None

    @property
    def digest(self) -> int:
        """Of all that was pickled."""
        return self._sink.crc

    def problem_of(self, item: Any) -> str | None:
        """Why it cannot be pickled; None where it can."""
        try:
            self.dump(item)
        except _Enough:
            pass
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def reducer_override(self, item: Any) -> Any:
        """Let a number stand for what is not pickled."""
        if isinstance(item, torch.Tensor):
            self.tensors += 1
            if item.device.type != "cpu" or (item.requires_grad and not item.is_leaf):
                self.unusual = f"a tensor on {item.device}{', with its gradient' if item.requires_grad else ''}"
            return int, (0 if self._is_batch else _version(item),)
        if self._is_batch or item is int or item is list:
            return NotImplemented
        if isinstance(item, types.FunctionType):
            cells = [cell.cell_contents for cell in item.__closure__ or () if _is_filled(cell)]
            return list, ([*cells, item.__defaults__, item.__kwdefaults__],)
        is_closed = isinstance(item, io.IOBase) and item.closed
        if is_closed or isinstance(item, (*_LEFT_OUT, *_numpy_types(sys.modules.get("numpy")))):
            return int, ()
        if type(item).__module__ == "numpy" and getattr(item, "nbytes", 0) > LARGE_ARRAY_BYTES:
            return int, (item.nbytes,)
        return NotImplemented


_LEFT_OUT = (
    *(type, types.ModuleType, types.BuiltinFunctionType, random.Random, torch.Generator),
    *(type(threading.Lock()), type(threading.RLock())),
)


def _numpy_types(numpy: Any) -> tuple[type, ...]:
    return () if numpy is None else (numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator)


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _version(tensor: torch.Tensor) -> int:
    """How often it was written to; 0 where torch does not count."""
    return 0 if tensor.is_inference() else tensor._version


class _Digest(io.RawIOBase):
    """A checksum of what is written, up to a limit."""

    def __init__(self) -> None:
        self.crc = 0
        self._bytes = 0

    def write(self, data: Any) -> int:
        """Take in what a pickler writes."""
        self.crc = zlib.crc32(data, self.crc)
        self._bytes += len(data)
        if self._bytes > MOST_STATE_BYTES:
            raise _Enough
        return len(data)


def _generators_now() -> tuple[Any, ...]:
    """The state of the random generators that all code of this process shares."""
    numpy = sys.modules.get("numpy")
    of_numpy = pickle.dumps(numpy.random.get_state()) if numpy is not None else b""
    return bytes(torch.get_rng_state().tolist()), random.getstate(), of_numpy


def _file_positions() -> dict[str, int]:
    """The position of each file that this process has open to read; empty where there is no /proc.

    Files that are only written or appended to are no data: logs, and Fulltilt's record, grow during a fetch too.
    """
    positions = {}
    try:
        import fcntl

        descriptors = os.listdir("/proc/self/fd")  # noqa: PTH208
    except (OSError, ImportError):
        return {}
    for descriptor in descriptors:
        try:
            path = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
            if not path.startswith("/") or path.startswith(("/dev/", "/proc/", "/sys/")) or "(deleted)" in path:
                continue
            flags = fcntl.fcntl(int(descriptor), fcntl.F_GETFL)
            if flags & os.O_ACCMODE != os.O_WRONLY and not flags & os.O_APPEND:
                positions[f"{descriptor} {path}"] = os.lseek(int(descriptor), 0, os.SEEK_CUR)
        except (OSError, ValueError):
            continue
    return positions


def _moved(before: dict[str, int], after: dict[str, int]) -> bool:
    """Whether a file that was open all the time was read on: its position would be shared by forked readers."""
    return any(after[key] != position for key, position in before.items() if key in after)
