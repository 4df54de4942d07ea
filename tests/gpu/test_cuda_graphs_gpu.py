"""A model replayed from CUDA graphs trains to the very weights of one that is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fulltilt.train.cuda_graphs import GraphedModel  # noqa: E402

pytestmark = pytest.mark.gpu
STEPS = 14


class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Convolution, batch norm, dropout and a named output, as real models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(3, 32, 3, padding=1), torch.nn.BatchNorm2d(32), torch.nn.GELU(), torch.nn.Dropout(0.3)
        )
        self.head = torch.nn.Linear(32, 5)
        self.unused = torch.nn.Linear(4, 4)

    def forward(self, images: Any, scale: float = 1.0) -> dict[str, Any]:
        """Logits, and where the largest lies."""
        logits = self.head(self.body(images).mean((2, 3))) * scale
        return {"logits": logits, "best": logits.argmax(1)}


def trained(graphs: bool, step: Callable[[Any, Any], None] | None = None, make: Any = Net) -> tuple[Any, list[str]]:
    """The weights after some steps on batches of one shape and now and then another."""
    torch.manual_seed(0)
    model = make().cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    said: list[str] = []
    replaying = GraphedModel(model, model, said.append) if graphs else None
    draw = torch.Generator("cuda").manual_seed(1)
    for number in range(STEPS):
        rows = 5 if number % 6 == 5 else 16
        images = torch.randn(rows, 3, 16, 16, device="cuda", generator=draw)
        optimizer.zero_grad(set_to_none=True)
        (step or one_piece)(model, images)
        optimizer.step()
    if replaying is not None:
        replaying.undo()
    return model, said


def loss_of(model: Any, images: Any) -> Any:
    with torch.autocast("cuda", torch.bfloat16):
        out = model(images)
    assert out["best"].dtype == torch.int64
    return torch.nn.functional.cross_entropy(out["logits"].float(), torch.arange(len(images), device="cuda") % 5)


def one_piece(model: Any, images: Any) -> None:
    loss_of(model, images).backward()


def two_pieces(model: Any, images: Any) -> None:
    for piece in images.chunk(2):
        (loss_of(model, piece) / 2).backward()


def two_forwards(model: Any, images: Any) -> None:
    (loss_of(model, images) + loss_of(model, images.flip(0))).backward()


@pytest.mark.parametrize("step", [one_piece, two_pieces, two_forwards])
def test_the_weights_are_those_of_the_plain_steps(step: Any) -> None:
    plain, _ = trained(False, step)
    replayed, said = trained(True, step)
    assert not said
    for (name, one), other in zip(plain.state_dict().items(), replayed.state_dict().values(), strict=True):
        assert torch.equal(one, other), f"{name}: {(one.float() - other.float()).abs().max()}"


def test_there_are_replays_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    replays = []
    plain = torch.cuda.CUDAGraph.replay

    def counted(graph: Any) -> None:
        replays.append(graph)
        plain(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    trained(True)
    # Twelve steps of one shape, the first three as they are; forward and backward each.
    assert len(replays) == 2 * (STEPS - 2 - 3)


class Asking(Net):
    """A model that looks at a value, which no graph can hold."""

    def forward(self, images: Any, scale: float = 1.0) -> dict[str, Any]:
        """As ever, unless the pictures are dark."""
        return super().forward(images, 2.0 if images.mean().item() < -10 else scale)


def test_a_model_that_asks_for_values_trains_on() -> None:
    plain, _ = trained(False, make=Asking)
    replayed, said = trained(True, make=Asking)
    assert len(said) == 1
    assert "cannot be captured" in said[0]
    for one, other in zip(plain.state_dict().values(), replayed.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert torch.rand(3, device="cuda").isfinite().all(), "random numbers still come"


class Moving(Net):
    """A model that makes a constant on the host and moves it in every forward, as timm's EdgeNeXt does."""

    def forward(self, images: Any, scale: float = 1.0) -> dict[str, Any]:
        """Shifted by nothing."""
        return super().forward(images + torch.zeros(images.shape[1:]).to(images.device), scale)


def test_constants_that_a_model_moves_to_the_gpu_are_made_there() -> None:
    plain, _ = trained(False, make=Moving)
    replayed, said = trained(True, make=Moving)
    assert not said
    for one, other in zip(plain.state_dict().values(), replayed.state_dict().values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("compile", [False, True])
def test_a_loop_that_keeps_its_loss_is_recorded_too_compiled_or_not(compile: bool) -> None:
    torch.manual_seed(0)
    model = Net().cuda().train()
    compiled = torch.compile(model) if compile else model
    said: list[str] = []
    replaying = GraphedModel(model, compiled, said.append)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    images = torch.randn(16, 3, 16, 16, device="cuda")
    for _ in range(40):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(compiled, images)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    replaying.undo()
    assert not said
    assert losses[-1] < 0.8 * losses[0]


class AskingInEvaluation(Net):
    """A model that looks at a value when it evaluates."""

    def forward(self, images: Any, scale: float = 1.0) -> dict[str, Any]:
        """As ever."""
        return super().forward(images, scale if self.training or images.mean().item() > -10 else 2.0)


@pytest.mark.parametrize("make", [Net, AskingInEvaluation])
def test_an_evaluation_is_replayed_too_and_sees_the_weights_of_now(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    replays = []
    plain = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(graph), plain(graph))[1])
    evaluated: dict[bool, list[Any]] = {False: [], True: []}

    def then_evaluate(graphs: bool) -> Callable[[Any, Any], None]:
        def step(model: Any, images: Any) -> None:
            one_piece(model, images)
            model.eval()
            with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
                evaluated[graphs].append(model(images)["logits"].float().cpu())
            model.train()

        return step

    ones, _ = trained(False, then_evaluate(False), make)
    assert not replays
    others, said = trained(True, then_evaluate(True), make)
    assert len(replays) >= (27 if make is Net else 10)
    assert [text for text in said if "evaluation cannot be captured" in text] == said
    assert len(said) == (make is AskingInEvaluation)
    for name, one in ones.state_dict().items():
        assert torch.equal(one, others.state_dict()[name]), name
    for one, other in zip(evaluated[False], evaluated[True], strict=True):
        assert torch.equal(one, other)
