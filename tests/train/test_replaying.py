"""When a call of the model is a replay and when it is not. The graphs themselves need a GPU: tests/gpu."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fulltilt.train import replaying
from fulltilt.train.replaying import EAGER_FIRST, MOST_SHAPES, Replaying


class FakeGraph:
    """Counts its replays."""

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        """See CUDAGraph."""
        self.replays += 1


class Counted(torch.nn.Module):
    """A linear layer that counts the calls of its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.calls = 0

    def forward(self, values: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Scaled."""
        self.calls += 1
        out: torch.Tensor = self.layer(values) * scale
        return out


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> Any:
    """A model whose recordings are made of ones: what is a replay shows in its values."""

    def record(call: Any, tensors: Any, parameters: Any, buffers: Any, pool: Any) -> replaying.Recorded:
        out = call(tensors).detach()
        gradients = tuple(torch.ones_like(p) for p in parameters)
        places = tuple(tensor.clone() for tensor in tensors)
        return replaying.Recorded(
            FakeGraph(),
            FakeGraph(),
            places,
            (torch.ones_like(out),),
            (torch.zeros_like(out),),
            tuple(parameters),
            gradients,
            replaying.pytree.tree_flatten(out)[1],
        )

    monkeypatch.setattr(replaying, "record", record)
    monkeypatch.setattr(replaying, "has_room", lambda *_: True)
    monkeypatch.setattr(replaying, "_fits", lambda value: not (isinstance(value, torch.Tensor) and value.requires_grad))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    counted = Counted()
    counted.replaying = Replaying(counted, counted, said.append)  # type: ignore[assignment]
    return counted


def train(model: Any, batch: torch.Tensor) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    out: torch.Tensor = model(batch)
    out.sum().backward()  # type: ignore[no-untyped-call, unused-ignore]
    return out


def is_replay(out: torch.Tensor) -> bool:
    return bool((out == 1).all())


def test_a_shape_that_keeps_coming_is_replayed_and_others_are_not(model: Any) -> None:
    batch, other = torch.randn(4, 3), torch.randn(2, 3)
    assert [is_replay(train(model, batch)) for _ in range(EAGER_FIRST + 3)] == [False] * EAGER_FIRST + [True] * 3
    assert model.layer.weight.grad.equal(torch.ones(2, 3))
    assert not is_replay(train(model, other))
    assert is_replay(train(model, batch))


def test_evaluation_and_calls_without_gradients_run_as_they_are(model: Any) -> None:
    batch = torch.randn(4, 3)
    for _ in range(EAGER_FIRST + 1):
        train(model, batch)
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        assert not is_replay(model(batch))
    model.eval()
    assert not is_replay(model(batch))
    model.train()
    assert is_replay(model(batch))


def test_a_second_forward_before_the_backward_leaves_the_first_alone(model: Any) -> None:
    batch = torch.randn(4, 3)
    for _ in range(EAGER_FIRST + 1):
        train(model, batch)
    model.zero_grad(set_to_none=True)
    first, second = model(batch), model(batch)
    assert (is_replay(first), is_replay(second)) == (True, False)
    del first, second  # nobody can ask for that backward any more
    assert is_replay(model(batch))


def test_gradients_that_another_backward_has_left_are_added_to(model: Any) -> None:
    batch = torch.randn(4, 3)
    for _ in range(EAGER_FIRST + 1):
        train(model, batch)
    model.zero_grad(set_to_none=True)
    assert is_replay(model(batch))
    train(model, batch)
    before = model.layer.weight.grad.clone()
    out = model(batch)
    assert not is_replay(out), "a replay would write over them"
    out.sum().backward()
    assert model.layer.weight.grad.allclose(before + batch.sum(0).expand(2, 3))


def test_other_arguments_are_another_recording(model: Any) -> None:
    batch = torch.randn(4, 3)
    for _ in range(EAGER_FIRST + 1):
        train(model, batch)
    model.zero_grad(set_to_none=True)
    assert not is_replay(model(batch, 2.0))
    assert not is_replay(model(values=batch))


def test_what_cannot_be_recorded_runs_as_it_is_and_says_so_once(
    model: Any, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore about it")

    monkeypatch.setattr(replaying, "record", refuse)
    batch = torch.randn(4, 3)
    for _ in range(EAGER_FIRST + 4):
        assert not is_replay(train(model, batch))
    reason = "operation not permitted when stream is capturing"
    assert said == [f"the step cannot be recorded as a CUDA graph and runs as it is: {reason}"]


def test_without_memory_nothing_is_recorded_any_more(
    model: Any, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    batch, other = torch.randn(4, 3), torch.randn(2, 3)
    for _ in range(EAGER_FIRST + 1):
        train(model, batch)
    monkeypatch.setattr(replaying, "record", full)
    for _ in range(EAGER_FIRST + 2):
        assert not is_replay(train(model, other))
    assert not is_replay(train(model, batch)), "its memory was given back"
    assert len(said) == 1


def test_nothing_is_recorded_beside_a_forward_whose_backward_is_still_to_come(model: Any) -> None:
    batch = torch.randn(4, 3)
    replays = []
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        both = model(batch), model(batch)
        sum(both).sum().backward()  # type: ignore[union-attr]
        replays.append([is_replay(out) for out in both])
    # The fourth call would be recorded, but it is the second of its step.
    assert replays == [[False, False], [False, False], [True, False]]


def test_shapes_without_end_do_not_fill_the_memory(model: Any) -> None:
    for rows in range(1, MOST_SHAPES + 3):
        for _ in range(EAGER_FIRST + 1):
            out = train(model, torch.randn(rows, 3))
        assert is_replay(out) == (rows <= MOST_SHAPES)


def test_undone_the_model_is_as_it_was(model: Any) -> None:
    batch = torch.randn(4, 3)
    for _ in range(EAGER_FIRST + 1):
        train(model, batch)
    model.replaying.undo()
    assert "forward" not in vars(model)
    assert not is_replay(train(model, batch))
