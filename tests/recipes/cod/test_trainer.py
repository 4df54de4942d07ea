"""The cod recipe's parts: loss, experts, network, stages, and what it says about data it cannot use."""

from __future__ import annotations

import itertools
import re
import shutil
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from torch.nn import functional as F

from fulltilt.cli import main as command
from fulltilt.errors import DataError, UsageError
from fulltilt.recipes.cod import CodOptions
from fulltilt.recipes.cod import model as network
from fulltilt.recipes.cod.data import Pictures, check_pairs, pairs
from fulltilt.recipes.cod.model import Experts, check_backbone, imbalance
from fulltilt.recipes.cod.model import blocks as blocks_of
from fulltilt.recipes.cod.trainer import deep_loss, stages, structure_loss
from fulltilt.recipes.synthetic import make_folder
from fulltilt.train.job import trainable


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "cod"
    make_folder("cod", folder, 50, 0)
    return folder


def train(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        command.main(["train", "cod", *arguments])
    return int(ended.value.code or 0)


# --------------------------------------------------------------------------- loss


def naive_loss(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The structure loss as it is usually written, in whatever precision its input has."""
    weight = 1 + 5 * (F.avg_pool2d(mask, 31, stride=1, padding=15) - mask).abs()
    hidden = torch.sigmoid(logits)
    entropy = -(mask * torch.log(hidden) + (1 - mask) * torch.log(1 - hidden))
    both, either = (weight * hidden * mask).sum(), (weight * (hidden + mask)).sum()
    return (weight * entropy).sum() / weight.sum() + 1 - (both + 1) / (either - both + 1)


@pytest.mark.parametrize("reach", [12.0, 200.0], ids=["confident", "run away"])
def test_nan_is_there_with_the_naive_loss_in_half_precision_and_gone_with_ours(reach: float) -> None:
    torch.manual_seed(0)
    mask = (F.avg_pool2d(torch.rand(1, 1, 272, 272), 31, 1, 15) > 0.5).float()
    weight = torch.ones(1, 1, 1, 1, requires_grad=True)
    # A convolution gives half precision under autocast, as the network's last layer does.
    with torch.autocast("cpu", dtype=torch.float16):
        logits = F.conv2d((mask * 2 - 1 + 0.2 * torch.randn_like(mask)) * reach, weight)
        assert logits.dtype == torch.float16
        assert not torch.isfinite(naive_loss(logits, mask.half()))
        value = structure_loss(logits, mask)
    assert torch.isfinite(value)
    value.backward()
    assert torch.isfinite(weight.grad).all()


def test_the_loss_is_lowest_for_the_mask_itself_and_weighs_edges() -> None:
    mask = torch.zeros(1, 1, 64, 64)
    mask[..., 16:48, 16:48] = 1
    logits = (mask * 2 - 1) * 20
    assert float(structure_loss(logits, mask)) < 1e-3
    at_edge, inside = logits.clone(), logits.clone()
    at_edge[..., 16:20, 30:34] *= -1
    inside[..., 30:34, 30:34] *= -1
    assert structure_loss(at_edge, mask) > structure_loss(inside, mask)
    empty = torch.zeros(1, 1, 64, 64)
    assert float(structure_loss(torch.full_like(empty, -20), empty)) < 1e-3


def test_a_half_batch_twice_gives_the_loss_of_the_whole() -> None:
    logits, mask = torch.randn(4, 1, 32, 32), (torch.rand(4, 1, 32, 32) > 0.7).float()
    halves = (structure_loss(logits[:2], mask[:2]) + structure_loss(logits[2:], mask[2:])) / 2
    assert torch.allclose(structure_loss(logits, mask), halves, atol=1e-6)


def test_deep_levels_and_the_balance_term_count() -> None:
    prediction, mask = torch.randn(2, 1, 32, 32), (torch.rand(2, 1, 32, 32) > 0.7).to(torch.uint8)
    deep = [torch.randn(2, 1, 2, 2), torch.randn(2, 1, 4, 4)]
    alone = deep_loss(prediction, (), torch.tensor(0.5), mask, 0.0)
    assert torch.allclose(alone, structure_loss(prediction, mask))
    assert torch.allclose(deep_loss(prediction, (), torch.tensor(0.5), mask, 0.1), alone + 0.05)
    coarse = [structure_loss(level, F.adaptive_avg_pool2d(mask.float(), level.shape[-1])) for level in deep]
    total = deep_loss(prediction, deep, torch.tensor(0.0), mask, 0.1)
    assert torch.allclose(total, alone + 0.5 * coarse[1] + 0.25 * coarse[0])


# --------------------------------------------------------------------------- experts


def test_the_mixture_is_the_sum_of_its_experts_weighted_by_the_router() -> None:
    torch.manual_seed(0)
    mixture = Experts(width=8, count=3, hidden=4)
    torch.nn.init.normal_(mixture.leave.weight)
    features = torch.randn(2, 8, 5, 5)
    mixed, _ = mixture(features)
    shares = torch.softmax(mixture.router(features.mean(dim=(2, 3))), dim=1)
    wanted = features + mixture.leave.bias[None, :, None, None]
    for expert in range(3):
        own = slice(4 * expert, 4 * expert + 4)
        hidden = F.conv2d(features, mixture.enter.weight[own], mixture.enter.bias[own])
        hidden = F.conv2d(hidden, mixture.look.weight[own], mixture.look.bias[own], padding=1, groups=4)
        part = F.conv2d(F.gelu(hidden), mixture.leave.weight[:, own])
        wanted = wanted + shares[:, expert, None, None, None] * part
    assert torch.allclose(mixed, wanted, atol=1e-5)


def test_the_balance_term_is_zero_for_even_use_and_pushes_towards_it() -> None:
    assert float(imbalance(torch.full((6, 4), 0.25))) == pytest.approx(0)
    assert float(imbalance(torch.eye(4)[[0, 1, 2, 3]])) == pytest.approx(0)  # each picture its own expert: even use
    assert float(imbalance(torch.eye(4)[[1, 1, 1]])) == pytest.approx(3)
    favoured = torch.tensor([[2.0, 0.0, 0.0]], requires_grad=True)
    imbalance(torch.softmax(favoured, dim=1)).backward()
    assert favoured.grad is not None
    assert favoured.grad[0, 0] > 0 > favoured.grad[0, 1]


# --------------------------------------------------------------------------- network


def test_it_answers_as_it_is_called() -> None:
    net = network.build("test_resnet", 64, width=16, num_experts=7).eval()
    images = torch.randn(2, 3, 64, 64)
    prediction, auxiliary, deep = net(images, return_deep_supervision=True)
    assert prediction.shape == (2, 1, 64, 64)
    assert auxiliary.shape == ()
    assert [tuple(level.shape[-2:]) for level in deep] == [(2, 2), (4, 4), (8, 8)]
    assert torch.equal(net(images), prediction)


@pytest.mark.parametrize("name", ["test_vit", "test_efficientnet"])
def test_other_families_of_backbones_work(name: str) -> None:
    check_backbone(name, 96, "none")
    assert network.build(name, 96, width=16)(torch.randn(1, 3, 96, 96)).shape == (1, 1, 96, 96)


def test_a_frozen_backbone_keeps_its_statistics_until_its_block_is_unfrozen() -> None:
    net = network.build("test_resnet", 64, width=16)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(not name.startswith("backbone.") or name.startswith("backbone.layer4"))
    before = {name: value.clone() for name, value in net.named_buffers() if name.endswith("running_mean")}
    net.train()
    net(torch.randn(4, 3, 64, 64))
    moved = {name for name, value in net.named_buffers() if name in before and not torch.equal(before[name], value)}
    assert moved
    assert all(name.startswith("backbone.layer4") for name in moved)


def test_backbone_weights_come_from_a_file_and_only_from_one_that_fits(tmp_path: Path) -> None:
    whole = timm.create_model("test_resnet")
    torch.save(whole.state_dict(), tmp_path / "own.pth")
    torch.save({"elsewhere.weight": torch.zeros(3)}, tmp_path / "other.pth")
    net = network.build("test_resnet", 64, weights=str(tmp_path / "own.pth"), width=16)
    assert torch.equal(net.backbone.state_dict()["layer4.0.conv1.weight"], whole.state_dict()["layer4.0.conv1.weight"])
    with pytest.raises(UsageError, match="holds no weights of test_resnet"):
        network.build("test_resnet", 64, weights=str(tmp_path / "other.pth"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("edgenext_bas", "did you mean edgenext_base"),
        ("crossvit_9_240", "gives no feature maps|takes no pictures of"),
        ("no such thing", "timm has no backbone"),
    ],
)
def test_a_backbone_that_will_not_do_is_refused_with_a_reason(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_backbone(name, 64, "none")


# --------------------------------------------------------------------------- stages


def test_stage_1_trains_the_decoder_and_stage_2_unfreezes_from_the_deepest_block() -> None:
    net = network.build("test_resnet", 64, width=16)
    names = [name for name, _ in net.named_parameters()]
    backbone = {name for name in names if name.startswith("backbone.")}
    blocks = blocks_of(net.backbone)
    assert blocks[0] == ("backbone.layer4.*",)
    first, second = stages(CodOptions(stage1_epochs=30, stage2_batch_size=4), 120, blocks)
    assert (first.epochs, second.epochs, second.batch_size, second.lr) == (30, 90, 4, 2.4e-4)
    assert trainable(names, first, 29) == set(names) - backbone
    unfrozen = [trainable(names, second, epoch) & backbone for epoch in range(90)]
    assert {name.split(".")[1] for name in unfrozen[0]} == {"layer4"}
    assert all(earlier <= later for earlier, later in itertools.pairwise(unfrozen))
    assert len({len(names) for names in unfrozen}) == len(blocks)
    assert unfrozen[36] == backbone


def test_without_progressive_unfreezing_stage_2_moves_everything_and_stage_1_can_be_skipped() -> None:
    net = network.build("test_resnet", 64, width=16)
    names = [name for name, _ in net.named_parameters()]
    options = CodOptions(stage1_epochs=30, skip_stage1=True, progressive_unfreeze=False)
    (only,) = stages(options, 120, blocks_of(net.backbone))
    assert only.epochs == 90
    assert trainable(names, only, 0) == set(names)


@pytest.mark.parametrize(("epochs", "lengths"), [(1, [1]), (2, [2]), (8, [2, 6]), (120, [30, 90]), (140, [30, 110])])
def test_a_short_training_has_both_stages_without_being_told_their_lengths(epochs: int, lengths: list[int]) -> None:
    """Seen to fail: `fulltilt train cod --epochs 8` was refused, because stage 1 alone had 30."""
    assert [stage.epochs for stage in stages(CodOptions(), epochs, [("backbone.*",)])] == lengths


# --------------------------------------------------------------------------- data


def test_made_data_is_the_same_for_the_same_seed_in_the_layout_of_cod10k(data: Path, tmp_path: Path) -> None:
    make_folder("cod", tmp_path / "again", 50, 0)
    make_folder("cod", tmp_path / "other", 50, 1)

    def content(folder: Path) -> dict[str, bytes]:
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.*g")}

    assert content(data) == content(tmp_path / "again")
    assert not set(content(data).values()) & set(content(tmp_path / "other").values())
    assert len(pairs(data, "Train", noncam=True)) + len(pairs(data, "Test", noncam=True)) == 50
    assert len(pairs(data, "Train")) < len(pairs(data, "Train", noncam=True))
    picture, mask = Pictures(pairs(data, "Train"), 48)[0]
    assert (picture.shape, picture.dtype) == ((3, 48, 48), torch.uint8)
    assert mask.shape == (1, 48, 48)
    assert set(mask.unique().tolist()) == {0, 1}


@pytest.fixture
def spoilt(data: Path, tmp_path: Path) -> Path:
    """A copy of the data that a test may break."""
    return Path(shutil.copytree(data, tmp_path / "data"))


def break_it(folder: Path, how: str) -> str:
    """Returns what the message has to name."""
    if how == "no folder":
        return str(folder.rename(folder.with_name("gone")).with_name("data"))
    if how == "no masks":
        (folder / "Test" / "GT_Object").rename(folder / "Test" / "GT")
        return str(folder / "Test" / "GT_Object")
    pair = pairs(folder, "Train")[3]
    if how == "one mask missing":
        pair.mask.unlink()
        return str(pair.picture)
    broken = pair.mask if how == "another size" else pair.picture
    broken.unlink()
    if how == "cut short":
        broken.write_bytes(b"\xff\xd8\xff")
    elif how == "a bomb":
        Image.new("1", (20_000, 10_000)).save(broken, "PNG", compress_level=1)
    else:
        Image.new("L", (10, 12)).save(broken)
    return str(broken)


@pytest.mark.parametrize("how", ["no folder", "no masks", "one mask missing", "cut short", "a bomb", "another size"])
def test_bad_data_ends_with_4_and_says_what_and_where(
    how: str, spoilt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = break_it(spoilt, how)
    assert train("--data", str(spoilt), "--out", str(tmp_path / "out"), "--backbone", "test_resnet") == 4
    told = capsys.readouterr().err.splitlines()
    assert len(told) <= 3
    assert named in told[0]


@pytest.mark.parametrize("suffix", [".tif", ".gif"])
def test_pictures_and_masks_of_other_formats_are_not_left_out(suffix: str, spoilt: Path) -> None:
    """Seen to fail: nobody was told that they were."""
    before = pairs(spoilt, "Train")
    expected = Pictures(before, 32)[0][1]
    for path in (before[0].picture, before[0].mask):
        with Image.open(path) as opened:
            opened.convert("L").save(path.with_suffix(suffix))
        path.unlink()
    after = pairs(spoilt, "Train")
    assert (len(after), after[0].mask.suffix) == (len(before), suffix)
    check_pairs(after)
    assert torch.equal(Pictures(after, 32)[0][1], expected)


def test_the_file_that_cannot_be_read_is_named(spoilt: Path) -> None:
    """Seen to fail: it was the picture "or its mask"."""
    pair = pairs(spoilt, "Train")[0]
    pair.mask.write_bytes(pair.mask.read_bytes()[:-40])
    with pytest.raises(DataError, match=f"cannot read {re.escape(str(pair.mask))}: "):
        Pictures([pair], 32)[0]


def test_masks_are_found_whatever_their_suffix_and_a_systems_own_files_are_passed_over(spoilt: Path) -> None:
    first, second, *_ = pairs(spoilt, "Train")
    first.mask.rename(first.mask.with_suffix(".PNG"))
    second.mask.rename(second.mask.with_suffix(".bmp"))
    first.picture.with_name(f"._{first.picture.name}").write_bytes(b"of a Mac")
    found = pairs(spoilt, "Train")
    assert [pair.mask.suffix for pair in found[:2]] == [".PNG", ".bmp"]
    assert all(pair.mask.is_file() for pair in found)
    for path in (spoilt / "Test" / "Image").iterdir():
        path.unlink()
    with pytest.raises(DataError, match="holds no image"):
        pairs(spoilt, "Test")


def test_a_wrong_option_is_told_before_data_is_made(tmp_path: Path) -> None:
    assert train("--out", str(tmp_path / "out"), "--backbone", "edgenext_bas") == 2
    assert not (tmp_path / "out" / "synthetic").exists()


@pytest.mark.parametrize(
    "flags",
    [
        ["--num-experts", "0"],
        ["--stage1-epochs", "5", "--epochs", "5"],
        ["--weights", "nowhere.pth", "--backbone", "test_resnet"],
        ["--img-size", "8"],
    ],
)
def test_bad_options_end_with_2_before_training(
    flags: list[str], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--data", str(data), "--out", str(tmp_path / "out"), *flags) == 2
    assert len(capsys.readouterr().err.splitlines()) <= 3
    assert not (tmp_path / "out" / "checkpoints").exists()
