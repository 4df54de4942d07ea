from types import SimpleNamespace
from typing import Any

import torch

from fulltilt.recorder.rank_state import _name_of_group, memory_parts


def test_adam_holds_two_states_a_weight() -> None:
    model = torch.nn.Linear(10, 5, bias=False)
    frozen = torch.nn.Linear(10, 5)
    frozen.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 10)).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    parts = memory_parts(torch, [optimizer], on_gpu=False)
    step_counter = 4
    assert (parts.parameters, parts.weights_bytes, parts.gradients_bytes) == (50, 200, 200)
    assert parts.optimizer_bytes == 400 + step_counter
    assert parts.other_bytes is None
    assert parts.resident_bytes == 200 + 200 + 400 + step_counter


def test_weights_of_two_optimizers_are_counted_once() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    both = [torch.optim.SGD([weight], 0.1), torch.optim.SGD([weight], 0.1)]
    assert memory_parts(torch, both, on_gpu=False).parameters == 4


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
