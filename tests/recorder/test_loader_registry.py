"""Every loader that has iterators of torch, or derived from them, is measured, whoever makes and draws from them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from multiprocessing import reduction
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)
from torch.utils.data._utils import worker
from torch.utils.data.dataloader import _BaseDataLoaderIter, _SingleProcessDataLoaderIter

from fulltilt.recorder.loaders import LoaderStats
from fulltilt.recorder.loaders.loader_stats import length_of, stored
from fulltilt.recorder.loaders.registry import MOST_LOADERS
from fulltilt.recorder.loaders.settings_file import LoaderOverride
from fulltilt.recorder.loaders.workers import plain_loops
from fulltilt.recorder.manual_recording import LoopMarks
from fulltilt.recorder.session import Session
from fulltilt.records import Settings

DATA = TensorDataset(torch.arange(12).float())


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    session = Session(torch, tmp_path, time.perf_counter_ns())
    session.begin_here()
    yield session
    session.finish()


def drawn(session: Session) -> list[tuple[int, int, int]]:
    def counts(stats: LoaderStats) -> tuple[int, int, int]:
        return stats.passes, stats.batches, stats.samples

    return [counts(stats) for stats in session.loaders.all]


def test_a_loader_with_one_iterator_for_all_epochs_is_seen(session: Session) -> None:
    class Infinite(DataLoader[Any]):
        iterator = None

        def __iter__(self) -> Any:
            if self.iterator is None:
                self.iterator = self._get_iterator()
            for _ in range(2):
                yield next(self.iterator)

    loader = Infinite(DATA, batch_size=3)
    for _ in range(2):
        list(loader)
    assert drawn(session) == [(1, 4, 12)]
    assert session.loaders.all[0].given == ("dataset", "batch_size")


def test_an_iterator_made_without_its_loaders_iter_is_seen(session: Session) -> None:
    loader = DataLoader(DATA, batch_size=4)
    assert len(list(_SingleProcessDataLoaderIter(loader))) == 3
    assert drawn(session) == [(1, 3, 12)]


def test_the_next_of_a_derived_iterator_counts_once(session: Session) -> None:
    class Own(_SingleProcessDataLoaderIter):
        def __next__(self) -> Any:
            return super().__next__()

    assert len(list(Own(DataLoader(DATA, batch_size=6)))) == 2
    assert drawn(session) == [(1, 2, 12)]


def test_workers_that_persist_begin_pass_after_pass(session: Session) -> None:
    loader = DataLoader(DATA, batch_size=4, num_workers=1, persistent_workers=True)
    for _ in range(3):
        list(loader)
    assert drawn(session) == [(3, 9, 36)]


class Threaded(Dataset[int]):
    """Computes on a thread of its own, and imports something in the first sample."""

    computes_s = 0.01

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> int:
        thread = threading.Thread(target=self._compute, args=(0.2 if index == 0 else self.computes_s,))
        thread.start()
        thread.join()
        return index

    def _compute(self, cpu_s: float) -> None:
        until = time.thread_time() + cpu_s
        while time.thread_time() < until:
            pass


def test_the_first_batch_of_a_loader_without_workers_is_a_part_of_startup(session: Session) -> None:
    """A loader that imported librosa in its first sample could give less than the training got."""
    list(DataLoader(Threaded()))
    (told,) = (stats.record(True) for stats in session.loaders.all)
    assert told.first_wait_s >= 0.2
    assert told.helpers_cpu_s < 0.2, "only that of the four samples that were measured"


def test_threads_that_fetch_for_the_training_thread_are_told(session: Session) -> None:
    list(DataLoader(Threaded()))
    (told,) = (stats.record(True) for stats in session.loaders.all)
    assert told.helpers_cpu_s >= 3.9 * Threaded.computes_s
    assert told.wait_cpu_s < told.helpers_cpu_s


def test_the_last_smaller_batch_of_lists_is_counted(session: Session) -> None:
    boxes = [(torch.zeros(16), {"boxes": torch.zeros(n % 3, 4)}) for n in range(11)]
    loader = DataLoader(boxes, batch_size=8, collate_fn=lambda samples: tuple(zip(*samples, strict=True)))  # type: ignore[arg-type]
    list(loader)
    assert drawn(session) == [(1, 2, 11)]


class Stream(IterableDataset[Any]):
    """Stands for a data set of a library's: one sample after the other, or columns of several."""

    def __iter__(self) -> Any:
        return iter([{"row": [0.0] * 5, "label": n} for n in range(6)])

    def iter(self, batch_size: int) -> Any:
        yield from ({"row": [[0.0] * 5] * batch_size, "label": [0] * batch_size} for _ in range(6 // batch_size))


@pytest.fixture
def watched(session: Session) -> Session:
    library = ModuleType("datasets.iterable_dataset")
    library.IterableDataset = Stream  # type: ignore[attr-defined]
    session.watch_iterables(library)
    return session


def test_what_a_library_brings_without_a_loader_is_counted(watched: Session) -> None:
    list(Stream())
    assert drawn(watched) == [(1, 6, 6)]
    list(Stream().iter(batch_size=3))
    assert drawn(watched)[1:] == [(1, 2, 6)]
    assert watched.loaders.all[0].made_by == "datasets"


def test_a_librarys_data_set_in_a_loader_counts_once(watched: Session) -> None:
    list(DataLoader(Stream(), batch_size=3, collate_fn=lambda samples: torch.zeros(len(samples), 5)))
    assert drawn(watched) == [(1, 2, 6)]


def test_a_loader_inside_what_a_library_brings_counts_alone(watched: Session) -> None:
    loader = DataLoader(DATA, batch_size=4)
    library = ModuleType("torchdata.nodes.loader")
    library.Loader = type("Loader", (), {"__iter__": lambda _: (batch for batch in loader)})  # type: ignore[attr-defined]
    watched.watch_iterables(library)
    list(library.Loader())  # type: ignore[attr-defined]
    assert drawn(watched) == [(1, 3, 12), (1, 0, 0)]


def test_arguments_count_as_written_in_a_derived_class(session: Session) -> None:
    class Named(DataLoader[Any]):
        def __init__(self, dataset: Any, **others: Any) -> None:
            super().__init__(dataset, num_workers=0, **others)

    class Unnamed(DataLoader[Any]):
        def __init__(self, *args: Any, **others: Any) -> None:
            super().__init__(*args, **others)

    for kind in (Named, Unnamed):
        loader = kind(DATA, batch_size=2)
        assert session.loaders.of(loader).given == ("dataset", "batch_size")


def test_settings_reach_a_class_that_calls_no_constructor_of_torchs(session: Session) -> None:
    class Stateful(DataLoader[Any]):
        def __init__(self, dataset: Any, shuffle: bool = False, num_workers: int = 0, **others: Any) -> None:
            vars(self).update(vars(DataLoader(dataset, shuffle=False, num_workers=num_workers, **others)))

    session.loaders.override = LoaderOverride(Settings(num_workers=2))
    assert Stateful(DATA, True).num_workers == 2
    assert Stateful(DATA).num_workers == 0


def test_classes_of_the_family_get_their_originals_back(tmp_path: Path) -> None:
    class Early(DataLoader[Any]):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)

    before = vars(Early)["__init__"], vars(_BaseDataLoaderIter)["__next__"]
    session = Session(torch, tmp_path, time.perf_counter_ns())
    session.install()
    assert vars(Early)["__init__"] is not before[0]

    class Late(DataLoader[Any]):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)

    during = vars(Late)["__init__"]
    session.finish()
    assert (vars(Early)["__init__"], vars(_BaseDataLoaderIter)["__next__"]) == before
    assert vars(Late)["__init__"] is during.__wrapped__
    assert "__init_subclass__" not in vars(DataLoader)


def test_workers_started_on_two_threads_run_torchs_loop(session: Session) -> None:
    """The second thread took the first one's measured loop for torch's, and its workers called themselves for ever."""
    torchs, dump = worker._worker_loop, reduction.dump
    loaders = session.loaders
    first, second = (loaders.of(DataLoader(DATA, num_workers=1)) for _ in range(2))
    other = threading.Thread(target=loaders.start_workers, args=(lambda: None, second))

    def start() -> None:
        other.start()
        other.join(0.1)  # long enough to come in between

    loaders.start_workers(start, first)
    other.join()
    assert plain_loops[worker.__name__] is worker._worker_loop is torchs
    assert reduction.dump is dump


def test_workers_started_while_others_start_run_torchs_loop(session: Session) -> None:
    stats = session.loaders.of(DataLoader(DATA, num_workers=1))
    torchs = worker._worker_loop
    session.loaders.start_workers(lambda: session.loaders.start_workers(lambda: None, stats), stats)
    assert plain_loops[worker.__name__] is worker._worker_loop is torchs


def test_loaders_that_are_drawn_in_turns_train_together(session: Session) -> None:
    """Of two zipped loaders only the second was tuned, and the first kept the job waiting."""
    model = torch.nn.Linear(1, 1)
    list(DataLoader(DATA, batch_size=2))  # a validation that nothing shows
    for first, second in zip(DataLoader(DATA, batch_size=4), DataLoader(DATA, batch_size=4), strict=True):
        model(first[0][:, None] + second[0][:, None]).sum().backward()
    assert [stats.trains for stats in session.loaders.all] == [False, True, True]


# --------------------------------------------------------------------------- nothing of the user's runs for us


class Asked(Dataset[Any]):
    """A data set that counts who asks it for its length."""

    def __init__(self, samples: int = 6) -> None:
        self.samples = samples
        self.asked: list[int] = []

    def __len__(self) -> int:
        self.asked.append(threading.get_ident())
        return self.samples

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(1)


class Shuffles(Sampler[int]):
    """A sampler whose length is known only by making the order."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(6).tolist())

    def __len__(self) -> int:
        return sum(1 for _ in self)


def drawn_twice(tmp_path: Path, recorded: bool, **given: Any) -> tuple[list[int], float, list[int | None]]:
    """How often the data set was asked, the next random number, and the lengths in the record."""
    torch.manual_seed(0)
    session, data = Session(torch, tmp_path, time.perf_counter_ns()), Asked()
    if recorded:
        session.begin_here()
    lengths: list[int | None] = []
    try:
        loader = DataLoader(data, batch_size=2, **given)
        for _ in range(2):
            for _ in loader:  # list() would ask for the length
                pass
        if recorded:
            record = threading.Thread(target=lambda: lengths.extend(s.record(True).dataset_len for s in loaders.all))
            loaders = session.loaders
            record.start()
            record.join()
        return data.asked, float(torch.rand(1)), lengths
    finally:
        session.finish()


@pytest.mark.parametrize(
    ("given", "length"),
    [({}, 6), ({"shuffle": True}, 6), ({"sampler": Shuffles()}, None)],
    ids=["in order", "shuffled", "own sampler"],
)
def test_nobody_asks_for_a_length_but_torch(tmp_path: Path, given: dict[str, Any], length: int | None) -> None:
    plain, recorded = drawn_twice(tmp_path, False, **given), drawn_twice(tmp_path, True, **given)
    assert recorded == (*plain[:2], [length])


def test_a_length_is_told_where_no_code_of_the_users_runs() -> None:
    data = Asked()
    assert length_of([1, 2]) == length_of(TensorDataset(torch.zeros(2))) == length_of(Subset(data, [0, 1])) == 2
    assert length_of(DistributedSampler([1, 2, 3], 2, 0)) == length_of(RandomSampler(data, num_samples=2)) == 2
    assert length_of(data) is length_of(SequentialSampler(data)) is length_of(iter([1])) is None
    asked = len(data.asked)
    assert length_of(data) is None
    assert len(data.asked) == asked


def test_a_class_of_loaders_with_everything_of_its_own_is_left_alone(session: Session) -> None:
    class Own(DataLoader[Any]):
        def __init__(self, rows: Any) -> None:
            self.rows = rows

        def __iter__(self) -> Any:
            return iter(self.rows)

    assert list(iter(Own([1, 2]))) == [1, 2]
    assert session.loaders.all == []


def test_settings_leave_arguments_that_a_derived_class_does_not_take(session: Session) -> None:
    class Named(DataLoader[Any]):
        def __init__(self, data_dir: str, batch_size: int, shuffle: bool = True, num_workers: int = 0) -> None:
            super().__init__(DATA, batch_size, shuffle, num_workers=num_workers)

    session.loaders.override = LoaderOverride(Settings(num_workers=1, prefetch_factor=3))
    loader = Named("data", 4)
    assert (loader.num_workers, loader.prefetch_factor) == (1, 3)


def test_very_many_loaders_of_one_line_are_one_beyond_a_number(session: Session) -> None:
    kept = [DataLoader(TensorDataset(torch.zeros(samples))) for samples in range(1, 100)]
    assert len(session.loaders.all) == MOST_LOADERS + 1
    assert session.loaders.of(kept[-1]) is session.loaders.all[-1]


def test_a_generator_made_anew_in_each_epoch_is_one_loader(session: Session) -> None:
    marks = LoopMarks(session)
    for _ in range(3):
        list(marks.loader(torch.zeros(2, 1) for _ in range(2)))
    assert drawn(session) == [(3, 6, 12)]
    assert bool(iter(marks.loader(n for n in range(2)))), "it has no length, and is true"


def test_an_attribute_is_read_without_asking_for_the_dict() -> None:
    """In Python 3.11 a sampler whose ``__dict__`` was asked for took 1.7 times as long."""
    asked = []

    class Sampler:
        batch_size = 4

        @property
        def __dict__(self) -> dict[str, object]:  # type: ignore[override]
            asked.append(self)
            return {}

        @property
        def length(self) -> int:
            raise AssertionError("the user's code")

    sampler = Sampler()
    sampler.labels = [1]  # type: ignore[attr-defined]
    assert (stored(sampler, "labels"), stored(sampler, "batch_size"), stored(sampler, "other", 7)) == ([1], 4, 7)
    assert not asked
    assert stored(sampler, "length") is None
