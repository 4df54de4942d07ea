"""The gradient of a step is that of one large batch, whatever its parts and ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn import functional

from fulltilt.recipes.carclip.trainer import MOST_LOG_SCALE, compared, contrastive_loss
from fulltilt.train.guards import is_out_of_memory

SAMPLES = 24


class TwoTowers(nn.Module):
    """The interface of DualEncoder, with dropout in both towers."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 16))
        self.text = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 16))
        self.log_scale = nn.Parameter(torch.tensor(2.0))
        self.limit: int | None = None

    def forward(self, images: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.limit is not None and len(images) > self.limit:
            raise torch.OutOfMemoryError("pretended")
        return functional.normalize(self.image(images), dim=-1), functional.normalize(self.text(tokens), dim=-1)


def batch(first: int = 0, end: int = SAMPLES) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    images, tokens = torch.randn(SAMPLES, 12, generator=generator), torch.randn(SAMPLES, 8, generator=generator)
    cars = torch.arange(SAMPLES) % 20  # the last four show cars that are there already
    return {"image": images[first:end], "tokens": tokens[first:end], "car": cars[first:end]}


def parts(sizes: list[int]) -> list[dict[str, torch.Tensor]]:
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [batch(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def gradients(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def apart(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest difference in a tensor's gradient, as a share of its largest entry."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("sizes", [[12, 12], [6, 6, 6, 6], [10, 9, 5], [1] * SAMPLES])
def test_parts_have_the_gradient_of_one_large_batch(sizes: list[int]) -> None:
    model = TwoTowers(dropout=0.0)
    whole, _ = contrastive_loss(model, [batch()])
    divided, _ = contrastive_loss(model, parts(sizes))
    torch.testing.assert_close(divided, whole)
    assert apart(gradients(model, divided), gradients(model, whole)) < 1e-5


def test_plain_accumulation_has_another_gradient() -> None:
    """The test above could not fail if it had not."""
    model = TwoTowers(dropout=0.0)
    whole = gradients(model, contrastive_loss(model, [batch()])[0])
    plain = gradients(model, sum(contrastive_loss(model, [part])[0] for part in parts([12, 12])) / 2)  # type: ignore[arg-type]
    assert apart(plain, whole) > 0.05


def test_dropout_drops_the_same_when_a_part_is_computed_again() -> None:
    model = TwoTowers()
    torch.manual_seed(5)
    loss, _ = contrastive_loss(model, parts([8, 8, 8]))
    ours = gradients(model, loss)
    torch.manual_seed(5)  # the same draws, with all activations kept
    embedded = [model(part["image"], part["tokens"]) for part in parts([8, 8, 8])]
    images, texts = (torch.cat(rows) for rows in zip(*embedded, strict=True))
    kept, _ = compared(images, texts, batch()["car"], model.log_scale)
    assert loss == kept
    assert apart(ours, gradients(model, kept)) < 1e-5


def test_activations_of_one_part_are_kept_at_a_time() -> None:
    """Counted through what autograd saves: of four parts, one part's worth is alive after forward."""

    def saved(sizes: list[int]) -> int:
        model, alive = TwoTowers(), 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal alive
            if not isinstance(tensor, nn.Parameter) and tensor.ndim == 2 and tensor.shape[1] == 32:
                alive += tensor.shape[0]
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            contrastive_loss(model, parts(sizes))
        return alive

    assert saved([6, 6, 6, 6]) * 4 == saved([24])


def test_two_pictures_of_a_car_are_no_negatives() -> None:
    torch.manual_seed(0)
    images, texts = (functional.normalize(torch.randn(4, 8), dim=1) for _ in range(2))
    cars = torch.tensor([0, 1, 2, 0])
    loss, _ = compared(images, texts, cars, torch.tensor(1.0))
    scores = torch.e * images @ texts.T
    expected = 0.0
    for table in (scores, scores.T):
        for i in range(4):
            others = [j for j in range(4) if j == i or cars[j] != cars[i]]
            expected += float(torch.logsumexp(table[i, others], 0) - table[i, i]) / 8
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_it_is_float32_and_bounded_under_mixed_precision() -> None:
    model = TwoTowers(dropout=0.0)
    with torch.no_grad():
        model.log_scale.fill_(9.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, found = contrastive_loss(model, parts([12, 12]))
    assert loss.dtype == torch.float32
    assert model.log_scale.item() == pytest.approx(MOST_LOG_SCALE)
    assert 0.0 <= found["matched"] <= 1.0
    assert torch.isfinite(torch.cat([g.flatten() for g in gradients(model, loss)])).all()


# --------------------------------------------------------------------------- two ranks


def as_rank(rank: int, folder: str) -> tuple[float, list[torch.Tensor], list[str]]:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    try:
        model = TwoTowers(dropout=0.0)
        mine = [[batch(0, 8), batch(8, 13)], [batch(13, 24)]][rank]  # 13 samples in two parts, and 11 in one
        loss, _ = contrastive_loss(model, mine)
        # As the engine does: each rank's loss by its share of the samples, then the sum over the ranks.
        found = gradients(model, loss * ([13, 11][rank] / SAMPLES))
        for gradient in found:
            dist.all_reduce(gradient)
        return loss.item(), found, [outcome(model, mine, limit if rank == 1 else None) for limit in (10, None)]
    finally:
        dist.destroy_process_group()


def outcome(model: TwoTowers, mine: list[dict[str, torch.Tensor]], limit: int | None) -> str:
    model.limit = limit
    try:
        contrastive_loss(model, mine)
    except RuntimeError as error:
        return "out of memory" if is_out_of_memory(error) else repr(error)
    return "done"


def second_rank(folder: str) -> None:
    torch.set_num_threads(1)
    torch.save(as_rank(1, folder), f"{folder}/second")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = str(tmp_path_factory.mktemp("ranks"))
    # Not forked: a child would wait for threads that torch left behind in the parent.
    second = torch.multiprocessing.get_context("spawn").Process(target=second_rank, args=(folder,))
    second.start()
    first = as_rank(0, folder)
    second.join(60)
    return [first, torch.load(f"{folder}/second")]


@pytest.mark.slow
def test_two_ranks_have_the_gradient_of_one(two_ranks: list[Any]) -> None:
    model = TwoTowers(dropout=0.0)
    whole, _ = contrastive_loss(model, [batch()])
    expected = gradients(model, whole)
    for loss, found, _ in two_ranks:
        assert loss == pytest.approx(whole.item(), rel=1e-6)
        assert apart(found, expected) < 1e-5


def test_memory_that_runs_out_on_one_rank_runs_out_on_both(two_ranks: list[Any]) -> None:
    assert [outcomes for _, _, outcomes in two_ranks] == [["out of memory", "done"]] * 2
