"""What is put back, and what is refused, when a call is recorded; with a CUDA whose graphs run at once."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fulltilt.train import cuda_graphs


class Streams:
    """The current stream of a GPU that is not there."""

    def __init__(self) -> None:
        self.current = "default"

    @contextlib.contextmanager
    def stream(self, wanted: str) -> Iterator[None]:
        """See torch.cuda."""
        before, self.current = self.current, wanted
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def graph(self, _graph: Any, stream: str, **_: Any) -> Iterator[None]:
        """As in torch 2.8: after an error nobody leaves the stream."""
        before, self.current = self.current, f"{stream}, recording"
        yield
        self.current = before


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    known = Streams()
    generator = SimpleNamespace(
        get_state=torch.get_rng_state, set_state=lambda _: None, graphsafe_set_state=lambda _: None
    )
    stand_ins = {
        "default_generators": {None: generator},
        "Stream": lambda _: "side",
        "CUDAGraph": object,
        "synchronize": lambda _: None,
        "empty_cache": lambda: None,
        "current_stream": lambda _: known.current,
        "stream": known.stream,
        "graph": known.graph,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch, "Generator", lambda _: SimpleNamespace(set_state=id, graphsafe_get_state=lambda: None))
    return known


class Sum(torch.nn.Module):
    """Two weights that are added, and what a forward may do besides."""

    mean: torch.Tensor

    def __init__(self, aside: Any = None) -> None:
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.ones(3)) for _ in "ab")
        self.register_buffer("mean", torch.zeros(3))
        self.calls, self.cache = 0, {"empty": True}
        self.aside = aside

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Scaled."""
        if self.aside is not None:
            self.aside(self)
        return (self.a + self.b) * values


def end(parameter: torch.nn.Parameter) -> Any:
    """The node of the autograd graph that hands ``parameter`` its gradient."""
    return parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def record(model: torch.nn.Module) -> cuda_graphs.CapturedCall:
    call = lambda tensors: model(*tensors)  # noqa: E731
    return cuda_graphs.capture(call, [torch.ones(3)], list(model.parameters()), model, (0, 1))


@pytest.mark.usefixtures("streams")
def test_gradients_that_autograd_makes_one_of_are_recorded_apart() -> None:
    first, second = record(Sum()).gradients
    assert first is not None
    assert second is not None
    assert first.data_ptr() != second.data_ptr(), "clipped in place, both would be clipped twice"


@pytest.mark.usefixtures("streams")
def test_no_step_that_somebody_keeps_reaches_into_a_recording() -> None:
    """The nodes in which the kept graph ends would bring its stream into the recording."""
    model = Sum()
    kept = model(torch.ones(3)).sum()
    before = {end(parameter) for parameter in model.parameters()}
    places = [parameter.data_ptr() for parameter in model.parameters()]
    recorded_with = []
    model.aside = lambda _: recorded_with.extend(end(parameter) for parameter in model.parameters())
    record(model)
    assert not before & set(recorded_with)
    assert places == [parameter.data_ptr() for parameter in model.parameters()]
    kept.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize(
    ("aside", "reason"),
    [
        (lambda _: random.random(), "draws Python's random numbers"),
        (lambda model: setattr(model, "calls", model.calls + 1), "changes calls"),
        (lambda model: setattr(model, "mean", model.mean + 1), "changes _buffers"),
        (lambda model: model.cache.update(mask=torch.ones(2)), "changes cache"),
        (lambda model: setattr(model, "new", torch.ones(2)), "changes new"),
    ],
)
def test_a_forward_that_changes_something_on_the_host_is_refused_and_leaves_nothing(aside: Any, reason: str) -> None:
    model = Sum(aside)
    before, drawn, mean = dict(vars(model)), random.getstate(), model.mean
    with pytest.raises(RuntimeError, match=reason):
        record(model)
    assert vars(model) == before
    assert random.getstate() == drawn
    assert model.mean is mean
    assert model.cache == {"empty": True}


@pytest.mark.usefixtures("streams")
def test_what_a_forward_writes_into_a_buffer_is_put_back_and_no_reason_to_refuse() -> None:
    model = Sum(lambda model: model.mean.add_(1))
    record(model)
    assert model.mean.equal(torch.zeros(3))


def test_after_a_recording_that_failed_the_stream_is_the_one_of_before(streams: Streams) -> None:
    model = Sum(lambda model: setattr(model, "calls", 1 / 0) if "recording" in streams.current else None)
    with pytest.raises(ZeroDivisionError):
        record(model)
    assert streams.current == "default"
