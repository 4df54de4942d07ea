import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from fulltilt.recorder.rank_state import RankState, _name_of_group, memory_parts
from fulltilt.recorder.session import Session


def test_adam_holds_two_states_a_weight() -> None:
    model = torch.nn.Linear(10, 5, bias=False)
    frozen = torch.nn.Linear(10, 5)
    frozen.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 10)).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    parts = memory_parts(torch, [optimizer], gpu=None)
    step_counter = 4
    assert (parts.parameters, parts.weights_bytes, parts.gradients_bytes) == (50, 200, 200)
    assert parts.optimizer_bytes == 400 + step_counter
    assert parts.other_bytes is None
    assert parts.resident_bytes == 200 + 200 + 400 + step_counter


def test_weights_of_two_optimizers_are_counted_once() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    both = [torch.optim.SGD([weight], 0.1), torch.optim.SGD([weight], 0.1)]
    assert memory_parts(torch, both, gpu=None).parameters == 4


class Store(dict[str, Any]):
    """What a process group's store does with the two calls that are made of it."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if key not in self and not expected:
            self[key] = desired.encode()
        return bytes(self[key])

    def add(self, key: str, amount: int) -> int:
        self[key] = self.get(key, 0) + amount
        return int(self[key])


def test_ranks_of_one_group_get_one_name_and_the_next_another() -> None:
    kept = Store()
    distributed = SimpleNamespace(distributed_c10d=SimpleNamespace(_get_default_store=lambda: kept))
    first, second = ({_name_of_group(distributed, 4) for _ in range(4)} for _ in range(2))
    third = {_name_of_group(distributed, 3) for _ in range(3)}
    assert len(first) == len(second) == len(third) == 1
    assert len(first | second | third) == 3


@pytest.mark.parametrize(("imported", "place"), [(True, (1, 2)), (False, (0, 1))])
def test_ranks_of_horovod_are_those_that_its_launcher_named(
    monkeypatch: pytest.MonkeyPatch, imported: bool, place: tuple[int, int]
) -> None:
    """Trainings that mpirun starts side by side, apart from each other, have the same variables."""
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    if imported:
        monkeypatch.setitem(sys.modules, "horovod", ModuleType("horovod"))
    state = RankState(torch)
    state.learn_rank()
    state.learn_group()
    assert (state.rank, state.world_size) == place
    assert state.group is None, "no store of torch's was asked for a name"


class Cuda(threading.local):
    """As torch's: the current device belongs to the thread, and begins at 0."""

    index = 0

    def memory_stats(self, index: int | None = None) -> dict[str, int]:
        return {"allocated_bytes.all.peak": 7 if (self.index if index is None else index) == 1 else 0}

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(uuid=str(index))

    def current_device(self) -> int:
        return self.index


def test_the_observer_reads_the_gpu_that_trains(tmp_path: Path) -> None:
    session, cuda = Session(torch, tmp_path, 0), Cuda()
    state = session.state
    cuda.index, state.gpu = 1, 1
    state._torch = SimpleNamespace(
        cuda=cuda, **{name: getattr(torch, name) for name in ("backends", "get_num_threads")},
        get_float32_matmul_precision=torch.get_float32_matmul_precision,
    )  # fmt: skip
    read: list[Any] = []
    observer = threading.Thread(
        target=lambda: read.append(state.record(0, 1.0, False, session.recorder.intervals, True, 1.0))
    )
    observer.start()
    observer.join()
    assert (read[0].device, read[0].gpu_uuid, read[0].vram_peak_bytes) == ("cuda:1", "GPU-1", 7)
