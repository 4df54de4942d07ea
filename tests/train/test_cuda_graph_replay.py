"""When a call of the model is a replay and when it is not. The graphs themselves need a GPU: tests/gpu."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from fulltilt.errors import UsageError
from fulltilt.train import cuda_graphs
from fulltilt.train.cuda_graphs import EAGER_FIRST, MOST_SHAPES, CapturedCall, GraphedModel


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

    def record(call: Any, tensors: Any, parameters: Any, model: Any, pool: Any, *, compiled: bool) -> CapturedCall:
        out = call(tensors).detach()
        gradients = tuple(torch.ones_like(p) for p in parameters)
        places = tuple(tensor.clone() for tensor in tensors)
        return CapturedCall(
            FakeGraph(),
            FakeGraph(),
            places,
            (torch.ones_like(out),),
            (torch.zeros_like(out),),
            tuple(parameters),
            gradients,
            pytree.tree_flatten(out)[1],
        )

    monkeypatch.setattr(cuda_graphs, "capture", record)
    monkeypatch.setattr(cuda_graphs, "has_room", lambda *_: True)
    monkeypatch.setattr(
        cuda_graphs, "_fits", lambda value: not (isinstance(value, torch.Tensor) and value.requires_grad)
    )
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    counted = Counted()
    counted.replaying = GraphedModel(counted, counted, said.append)  # type: ignore[assignment]
    return counted


def train(model: Any, batch: torch.Tensor) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    out: torch.Tensor = model(batch)
    out.sum().backward()  # type: ignore[no-untyped-call, unused-ignore]
    return out


def recorded_batch(model: Any) -> torch.Tensor:
    """A batch of a shape that is recorded by now; no gradient is left of it."""
    batch = torch.randn(4, 3)
    for _ in range(EAGER_FIRST + 1):
        train(model, batch)
    model.zero_grad(set_to_none=True)
    return batch


def is_replay(out: torch.Tensor) -> bool:
    return bool((out == 1).all())


def test_a_shape_that_keeps_coming_is_replayed_and_others_are_not(model: Any) -> None:
    batch, other = torch.randn(4, 3), torch.randn(2, 3)
    assert [is_replay(train(model, batch)) for _ in range(EAGER_FIRST + 3)] == [False] * EAGER_FIRST + [True] * 3
    assert model.layer.weight.grad.equal(torch.ones(2, 3))
    assert not is_replay(train(model, other))
    assert is_replay(train(model, batch))


def test_evaluation_and_calls_without_gradients_run_as_they_are(model: Any) -> None:
    batch = recorded_batch(model)
    with torch.no_grad():
        assert not is_replay(model(batch))
    model.eval()
    assert not is_replay(model(batch))
    model.train()
    assert is_replay(model(batch))


def test_a_second_forward_before_the_backward_leaves_the_first_alone(model: Any) -> None:
    batch = recorded_batch(model)
    first, second = model(batch), model(batch)
    assert (is_replay(first), is_replay(second)) == (True, False)
    del first, second  # nobody can ask for that backward any more
    assert is_replay(model(batch))


def test_gradients_that_another_backward_has_left_are_added_to(model: Any) -> None:
    batch = recorded_batch(model)
    assert is_replay(model(batch))
    train(model, batch)
    before = model.layer.weight.grad.clone()
    out = model(batch)
    assert not is_replay(out), "a replay would write over them"
    out.sum().backward()
    assert model.layer.weight.grad.allclose(before + batch.sum(0).expand(2, 3))


def test_other_arguments_are_another_recording(model: Any) -> None:
    batch = recorded_batch(model)
    assert not is_replay(model(batch, 2.0))
    assert not is_replay(model(values=batch))


def test_what_cannot_be_recorded_runs_as_it_is_and_says_so_once(
    model: Any, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore about it")

    monkeypatch.setattr(cuda_graphs, "capture", refuse)
    batch = torch.randn(4, 3)
    for _ in range(EAGER_FIRST + 4):
        assert not is_replay(train(model, batch))
    reason = "operation not permitted when stream is capturing"
    assert said == [f"the step cannot be captured as a CUDA graph and runs as it is: {reason}"]


def test_without_memory_nothing_is_recorded_any_more(
    model: Any, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    batch, other = torch.randn(4, 3), torch.randn(2, 3)
    for _ in range(EAGER_FIRST + 1):
        train(model, batch)
    monkeypatch.setattr(cuda_graphs, "capture", full)
    for _ in range(EAGER_FIRST + 2):
        assert not is_replay(train(model, other))
    assert not is_replay(train(model, batch)), "its memory was given back"
    assert len(said) == 1


def test_nothing_is_recorded_beside_a_forward_whose_backward_is_still_to_come(model: Any) -> None:
    batch, other = torch.randn(4, 3), torch.randn(2, 3)
    for _ in range(EAGER_FIRST):
        train(model, batch)
    model.zero_grad(set_to_none=True)
    first, second = model(other), model(batch)
    assert not is_replay(second)
    (first.sum() + second.sum()).backward()
    assert is_replay(train(model, batch))


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


def recorded(model: Any, batch: torch.Tensor) -> Any:
    """``model``, with its next call of such a batch a replay."""
    for _ in range(EAGER_FIRST + 1):
        train(model, batch)
    model.zero_grad(set_to_none=True)
    return model


def test_a_forward_that_is_to_be_computed_again_is_neither_recorded_nor_replayed(model: Any) -> None:
    batch = torch.randn(4, 3)
    for _ in range(EAGER_FIRST + 2):
        model.zero_grad(set_to_none=True)
        out = checkpoint(model, batch, use_reentrant=False)
        assert not is_replay(out)
        out.sum().backward()
        assert model.layer.weight.grad.allclose(batch.sum(0).expand(2, 3))
    recorded(model, batch)
    assert not is_replay(checkpoint(model, batch, use_reentrant=False))


def test_an_output_that_the_loss_leaves_out_does_not_keep_the_next_step_from_being_recorded(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recordings: list[int] = []
    plain = vars(cuda_graphs)["capture"]

    def counted(call: Any, *rest: Any, **options: Any) -> Any:
        recordings.append(1)
        return plain(lambda tensors: call(tensors)[1], *rest, **options)

    monkeypatch.setattr(cuda_graphs, "capture", counted)
    model.replaying._eager = lambda values: (model.layer(values) * 2, model.layer(values))
    kept: list[torch.Tensor] = []
    for _ in range(EAGER_FIRST + 1):
        model.zero_grad(set_to_none=True)
        kept[:] = model(torch.ones(4, 3))
        if len(kept) == 2:
            kept[1].sum().backward()  # type: ignore[no-untyped-call, unused-ignore]
    assert recordings


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.layer.eval(),
        lambda model: model.layer.bias.requires_grad_(False),
        lambda model: setattr(model.layer.weight, "data", model.layer.weight.data.clone()),
    ],
    ids=["mode", "frozen", "moved"],
)
def test_another_mode_or_place_of_a_part_is_recorded_anew(model: Any, change: Any) -> None:
    batch = torch.randn(4, 3)
    recorded(model, batch)
    change(model)
    assert [is_replay(train(model, batch)) for _ in range(EAGER_FIRST + 1)] == [False] * EAGER_FIRST + [True]


def test_a_second_backward_through_a_replay_is_refused(model: Any) -> None:
    out = recorded(model, torch.randn(4, 3))(torch.randn(4, 3)).sum()
    out.backward(retain_graph=True)
    with pytest.raises(UsageError, match="twice"):
        out.backward()


def test_copies_of_the_model_compute_with_their_own_weights(model: Any) -> None:
    del model.replaying
    batch = torch.randn(4, 3)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            copied.layer.weight.zero_()
            assert copied(batch).equal(copied.layer.bias.expand(4, 2))


def test_one_and_true_are_different_arguments(model: Any) -> None:
    batch = torch.randn(4, 3)
    for _ in range(EAGER_FIRST + 1):
        model.zero_grad(set_to_none=True)
        model(batch, True).sum().backward()
    model.zero_grad(set_to_none=True)
    assert not is_replay(model(batch, 1.0))


def test_the_reason_is_what_went_wrong_in_the_recording(
    model: Any, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        try:
            raise RuntimeError("it asks for a value")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(cuda_graphs, "capture", refuse)
    recorded(model, torch.randn(4, 3))
    assert said[0].endswith("runs as it is: it asks for a value")
