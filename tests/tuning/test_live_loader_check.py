"""What speaks against workers for a loader that has none, and whether two batches are the same."""

from __future__ import annotations

import gc
import io
import logging
import random
import socket
import sqlite3
import tarfile
import threading
import weakref
import zipfile
from array import array
from collections import deque
from collections.abc import Callable, Iterator, KeysView, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, default_collate

from fulltilt.recorder.dataset_state import AttributeWatch, Pickled
from fulltilt.tuning.live.loader_check import BatchCheck, bytes_written

# Outside of the data sets: what their code uses counts as well.
READ: list[TextIO] = []
WRITTEN: list[TextIO] = []


class Lines(Dataset[Any]):
    """Takes its samples from a file that stays open."""

    def __getitem__(self, index: int) -> Any:
        READ[0].seek(2 * index)
        return torch.tensor(int(READ[0].readline()))


def write(index: int) -> None:
    WRITTEN[0].write(f"{index}\n")
    WRITTEN[0].flush()


class WrittenBeside(Dataset[Any]):
    """Another thread writes meanwhile."""

    def __getitem__(self, index: int) -> Any:
        thread = threading.Thread(target=write, args=(index,))
        thread.start()
        thread.join()
        return torch.tensor(index)


class Kept(Dataset[Any]):
    """Keeps each sample in a file."""

    def __getitem__(self, index: int) -> Any:
        Path(f"{WRITTEN[0].name}-{index}").write_bytes(bytes(5000))
        return torch.tensor(index)


@pytest.fixture(autouse=True)
def files(tmp_path: Path) -> Any:
    (tmp_path / "data").write_text("".join(f"{index}\n" for index in range(8)))
    with (tmp_path / "data").open() as read, (tmp_path / "log").open("a+") as written:
        READ[:], WRITTEN[:] = [read], [written]
        yield
    READ.clear()
    WRITTEN.clear()


class Holding(Dataset[Any]):
    """Has something about it that fetching a sample does not depend on."""

    shared = 0

    def __init__(self, held: Any) -> None:
        self.held = held

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index)


class Remembering(Holding):
    """Keeps what it has read."""

    def __getitem__(self, index: int) -> Any:
        self.held[index] = np.full(2, index)
        return torch.from_numpy(self.held[index])


class SameInWorkers:
    """Stands for the pool that makes the batches again."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make

    def serve(self, queue: Any) -> None:
        self._queue = queue

    def draw(self) -> tuple[Any, Any]:
        indices = next(self._queue)
        return indices, self._make(indices)

    def retire(self) -> None:
        """There is nothing to end."""


def verdict_of(dataset: Any, collate: Any = default_collate) -> str | None:
    check = BatchCheck(serial=True)
    loader = DataLoader(dataset, collate_fn=collate)
    index = 0
    while check.is_collecting:
        check.about_to_fetch(loader)
        check.fetched([index], collate([dataset[index]]))
        index += 1
    if check.verdict is None:
        check.begin(loader, lambda _: SameInWorkers(lambda indices: collate([dataset[indices[0]]])))  # type: ignore[arg-type, return-value]
        if check.thread is not None:
            check.thread.join()
    return check.verdict


def test_a_file_that_is_read_on_would_be_shared_by_workers() -> None:
    assert "reads from an open file" in str(verdict_of(Lines()))


def test_what_another_thread_writes_is_no_reason_against_workers() -> None:
    """Fulltilt's own record is such a file: written during a fetch, it kept a starved job without workers."""
    assert verdict_of(WrittenBeside()) == BatchCheck.SAME


def test_a_data_set_that_writes_files_is_left_alone_before_anything_is_repeated(tmp_path: Path) -> None:
    before = bytes_written()
    (tmp_path / "probe").write_bytes(bytes(5000))
    if bytes_written() == before:
        pytest.skip("the system does not count what a thread writes here")
    assert "writes files while it makes a batch" in str(verdict_of(Kept()))
    assert len(list(tmp_path.glob("log-*"))) == 1


def closed_archives(tmp_path: Path) -> list[Any]:
    with zipfile.ZipFile(tmp_path / "z", "w") as packed, tarfile.open(tmp_path / "t", "w") as tape:
        packed.writestr("a", "1")
        tape.addfile(tarfile.TarInfo("a"))
        return [packed, tape, *packed.infolist(), *tape.getmembers()]


def inferred(_: Path) -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(2) + 1


HARMLESS: dict[str, Callable[[Path], Any]] = {
    "a NaN": lambda _: float("nan"),
    "a tensor of inference mode, which has no version": inferred,
    "pictures": lambda _: [Image.new("L", (2, 2))],
    "archives that are closed": closed_archives,
    "a logger with its files": lambda _: logging.getLogger("fulltilt.tests"),
    "bytes as a file": lambda _: [io.BytesIO(b"1"), io.StringIO("1")],
    "paths, which remember their text": lambda tmp_path: [tmp_path / "a"],
    "functions without a name": lambda tmp_path: [lambda: tmp_path, lambda value=tmp_path: value],
    "a class of the script's own": lambda _: type("Local", (), {}),
    "random generators": lambda _: [np.random.default_rng(0), torch.Generator()],
    "large arrays": lambda _: np.zeros(1 << 22),
}


@pytest.mark.parametrize("what", sorted(HARMLESS))
def test_what_many_data_sets_hold_is_no_reason_against_workers(what: str, tmp_path: Path) -> None:
    """Each of these kept a starved job without workers, or ended it."""
    assert verdict_of(Holding(HARMLESS[what](tmp_path))) == BatchCheck.SAME


def in_a_closure(tmp_path: Path) -> Callable[[], str]:
    connection = sqlite3.connect(tmp_path / "db")
    return lambda: str(connection)


NOT_SHARED: dict[str, Callable[[Path], Any]] = {
    "sqlite3.Connection": lambda tmp_path: sqlite3.connect(tmp_path / "db"),
    "Connection": in_a_closure,
    "socket": lambda _: socket.socket(),
    "BufferedReader": lambda tmp_path: (tmp_path / "data").open("rb"),
    "SimpleQueue": lambda _: ThreadPoolExecutor(1),
}


@pytest.mark.parametrize("what", sorted(NOT_SHARED))
def test_connections_files_and_threads_would_not_work_in_a_worker(what: str, tmp_path: Path) -> None:
    verdict = str(verdict_of(Holding(NOT_SHARED[what](tmp_path))))
    assert "holds what a worker cannot share" in verdict
    assert what in verdict


class LetsGo(Holding):
    """Hands over no handle: a worker opens its own."""

    def __getstate__(self) -> dict[str, Any]:
        self.held.clear()
        return vars(self)

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(self.held[0] + index)


def test_no_code_of_a_data_set_runs_to_look_at_it() -> None:
    assert verdict_of(LetsGo([1])) == BatchCheck.SAME


class Curriculum(Holding):
    level = 0

    def __init__(self, held: Any) -> None:
        super().__init__(held)
        self.cut, self.sizes, self.seen = 1000, [1], [torch.zeros(3)]
        self.counts, self.by_kind = np.zeros(8), {"bad": {"few": 0}}
        self.generator = random.Random(0)

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(self.cut + index + len(NOTED) + self.held.size)


def shrink(data: Any) -> None:
    data.held.size = 64


CHANGES: dict[str, tuple[str | None, Callable[[Any], object]]] = {
    "an attribute": ("cut", lambda data: setattr(data, "cut", 2000)),
    "one that is new": ("later", lambda data: setattr(data, "later", 0)),
    "one of what it holds": ("size", shrink),
    "one of its class": ("level", lambda data: setattr(type(data), "level", data.level + 1)),
    "one of a class above": ("shared", lambda _: setattr(Holding, "shared", Holding.shared + 1)),
    "a list that grows": ("sizes", lambda data: data.sizes.append(2)),
    "an element of a list": ("sizes", lambda data: data.sizes.__setitem__(0, 2)),
    "one of a small array": ("counts", lambda data: data.counts.__setitem__(3, 1.0)),
    "one of a nested dict": ("by_kind", lambda data: data.by_kind["bad"].update(few=1)),
    "what a tensor holds": ("seen", lambda data: data.seen[0].add_(1)),
    "a global that it reads": ("NOTED", lambda _: NOTED.append(1)),
    "a global that it does not read": (None, lambda _: globals().update(OTHER=1)),
    "a random generator": (None, lambda data: data.generator.gauss(0, 1)),
    "the same number again": (None, lambda data: setattr(data, "cut", int("1000"))),
    "nothing": (None, lambda _: None),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_the_script_assigns_in_its_data_set_is_seen(what: str) -> None:
    data = Curriculum(SimpleNamespace(size=32, itself=None))
    data.held.itself = data
    watch = AttributeWatch(data)
    name, change = CHANGES[what]
    change(data)
    assert watch.changed() == name


def test_a_store_that_grows_is_a_reason_against_workers() -> None:
    """Each worker would fill its own, in every pass anew."""
    assert "changes as it is read" in str(verdict_of(Remembering({})))


@pytest.mark.parametrize("mebibytes", [2, 80])
def test_a_large_array_that_is_written_to_is_a_reason_against_workers(mebibytes: int) -> None:
    class Counts(Holding):
        def __getitem__(self, index: int) -> Any:
            self.held[index::8] += 1
            return torch.tensor(index)

    assert "changes as it is read" in str(verdict_of(Counts(np.zeros(mebibytes << 17))))


class CountsInItsClass(Holding):
    reads = 0

    def __getitem__(self, index: int) -> Any:
        CountsInItsClass.reads += 1
        return super().__getitem__(index)


NOTED: list[int] = []


def note(index: int) -> None:
    NOTED.append(index)


class NotesInItsModule(Holding):
    def __getitem__(self, index: int) -> Any:
        note(index)
        return super().__getitem__(index)


@pytest.mark.parametrize("kind", [CountsInItsClass, NotesInItsModule])
def test_what_is_counted_in_a_class_or_a_module_is_a_reason_against_workers(kind: type[Holding]) -> None:
    """It would stay in the worker, and the script would go on with the old count."""
    assert "changes as it is read" in str(verdict_of(kind(None)))


# Wider, or larger, than what is looked at for every batch.
COUNTED: dict[str, Any] = {
    "list": lambda: [0] * 200,
    "dict": lambda: dict.fromkeys(range(200), 0),
    "deque": lambda: deque([0] * 200),
    "bytearray": lambda: bytearray(200),
    "array": lambda: array("q", [0] * 200),
    "NumPy array": lambda: np.zeros(2000, dtype=np.int64),
    "large NumPy array": lambda: np.zeros(1 << 18, dtype=np.int64),
    "tensor": lambda: torch.zeros(2000),
}
HITS: Any = None


class CountsInItsModule(Holding):
    def __getitem__(self, index: int) -> Any:
        HITS[index] += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("kind", COUNTED)
def test_what_is_counted_in_a_container_of_a_module_is_a_reason_against_workers(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "HITS", COUNTED[kind]())
    assert "changes as it is read" in str(verdict_of(CountsInItsModule(None)))


def test_what_is_counted_beside_a_data_set_of_many_names_is_seen_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than is looked at of what a data set holds: its code's values were left out."""
    monkeypatch.setattr("fulltilt.recorder.dataset_state.MOST_STATE_BYTES", 1 << 20)
    monkeypatch.setitem(globals(), "HITS", [0] * 200)
    names = [f"{index:040d}" for index in range(1 << 16)]
    assert "changes as it is read" in str(verdict_of(CountsInItsModule(names)))


def test_an_attribute_that_is_called_like_a_global_of_the_training_loop_is_not_that() -> None:
    """`self.a` in a data set, and a stopwatch `a = time.perf_counter()` around its batches: it was left alone."""

    class Named(Holding):
        def __getitem__(self, index: int) -> Any:
            return torch.tensor(self.NOTED + index)

        NOTED = 1

    def digest() -> bytes:
        return Pickled(Named(None), is_batch=False).digest

    before, watch = digest(), AttributeWatch(Named(None))  # pickling adds names to the class
    NOTED.append(1)
    assert digest() == before
    assert watch.changed() is None


def test_a_fetch_that_moves_the_generators_draws_random_numbers() -> None:
    class Rarely(Holding):
        def __getitem__(self, index: int) -> Any:
            np.random.default_rng(0).random()  # its own, and the same each time
            return torch.tensor(index) + (np.random.rand() < 1e-9)

    assert verdict_of(Rarely(None)) == BatchCheck.RANDOM


def test_batches_that_no_worker_can_hand_over_are_a_reason() -> None:
    grown = torch.ones(2, requires_grad=True) * 2
    assert "cannot send its batches" in str(verdict_of(Holding(None), lambda _: {"f": lambda: 0}))
    assert "cannot send its batches" in str(verdict_of(Holding(None), lambda _: grown))


# --------------------------------------------------------------------------- comparing


class Keys(KeysView[str]):
    """Has no ==, as that of PyTorch Geometric."""

    __eq__ = None  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


class Storage(MutableMapping[str, Any]):
    def __init__(self, **values: Any) -> None:
        self._mapping = values

    def __getitem__(self, key: str) -> Any:
        return self._mapping[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._mapping[key] = value

    def __delitem__(self, key: str) -> None:
        del self._mapping[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._mapping)

    def __len__(self) -> int:
        return len(self._mapping)

    def keys(self) -> Keys:
        return Keys(self)


class Graph:
    """Compares nothing itself."""

    def __init__(self, x: Any) -> None:
        self.store = Storage(x=x, name="a")

    def __eq__(self, other: object) -> bool:
        raise NotImplementedError

    __hash__ = None  # type: ignore[assignment]


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
        (torch.tensor([1]), torch.tensor([1.0]), False),
        (np.array([1.0]), np.array([1.0]), True),
        (np.array([1.0]), np.array([[1.0]]), False),
        ({"a": [1, (2.0, "x")]}, {"a": [1, (2.0, "x")]}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ([1, 2], [1], False),
        (float("nan"), float("nan"), True),
        (0.0, -0.0, False),
        (Graph(torch.ones(2)), Graph(torch.ones(2)), True),
        (Graph(torch.ones(2)), Graph(torch.zeros(2)), False),
        (Slotted(1), Slotted(1), True),
        (Slotted(1), Slotted(2), False),
        (Image.new("L", (2, 2)), Image.new("L", (2, 2)), True),
        (Image.new("L", (2, 2)), Image.new("L", (2, 2), 1), False),
        (torch.arange(6).view(2, 3).T, torch.arange(6).view(2, 3).T.contiguous(), True),
        (np.arange(6).reshape(2, 3).T, np.arange(6).reshape(2, 3).T.copy(), True),
    ],
)
def test_batches_are_compared_bit_for_bit(ours: Any, theirs: Any, same: bool) -> None:
    ours, theirs = Pickled(ours), Pickled(theirs)
    assert ours.problem is None
    assert (ours.digest == theirs.digest) is same


def test_what_was_pickled_is_let_go_at_once() -> None:
    """Freed in a collection, on whatever thread, its tensors would let go of the interpreter lock within that."""
    pickled = Pickled({"batch": torch.ones(3)})
    held = weakref.ref(pickled)
    gc.disable()
    try:
        del pickled
        assert held() is None
    finally:
        gc.enable()


def test_a_value_that_is_assigned_again_is_no_change() -> None:
    class Rows:
        crop: tuple[int, list[str]] = (0, [])

    data = Rows()
    data.crop = (3, ["a"])
    watch = AttributeWatch(data)
    data.crop = (int("3"), ["a"])
    assert watch.changed() is None
    data.crop = (3, ["a", "b"])
    assert watch.changed() == "crop"
