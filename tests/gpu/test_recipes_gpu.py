"""Recipes on a real GPU: the lines about GPUs, measures equal to the CPU's, learning. About 80 s on an H200."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fulltilt.cli import main as command
from fulltilt.recipes.synthetic import make_folder

pytestmark = pytest.mark.gpu


def train(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        command.main(["train", *arguments])
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "cod"
    make_folder("cod", folder, 1000, 0)
    return folder


def test_cod_learns_from_vram_and_prints_the_guides_lines(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (
        *("--backbone", "test_resnet", "--img-size", "96", "--decoder-width", "32", "--batch-size", "32"),
        *("--epochs", "16", "--stage1-epochs", "2", "--lr", "3e-3", "--stage2-lr", "3e-3", "--residency", "vram"),
    )
    assert train("cod", "--data", str(pictures), "--out", str(tmp_path), *flags) == 0
    shown = capsys.readouterr().out
    assert re.search(r"Using 1 GPU for training\nGPU 0: \S", shown)  # V9
    assert re.search(r"GPU Memory - Allocated: \d+\.\d\d GB, Peak: \d+\.\d\d GB", shown)  # V5
    assert "Batch size: 32 (expected: 32)" in shown  # V6
    assert re.search(r"GPU: \d+% \| VRAM:[\d.]+/[\d.]+GB", shown)  # V2
    with (tmp_path / "metrics.csv").open() as file:
        history = [float(row["eval_iou"]) for row in csv.DictReader(file)]
    assert history[-1] > 0.60
    assert history[-1] > max(history[:2]) + 0.05


def test_the_measures_are_those_of_the_cpu() -> None:
    from fulltilt.recipes.cod.trainer import measure

    torch.manual_seed(0)
    guess = torch.rand(5, 1, 64, 80)
    mask = (torch.nn.functional.avg_pool2d(guess, 15, 1, 7) > 0.5).to(torch.uint8)
    here, there = measure(guess, mask), measure(guess.cuda(), mask.cuda())
    for name, values in here.items():
        assert torch.allclose(values, there[name].cpu(), atol=1e-4), name


def test_half_precision_stays_finite_with_a_large_picture() -> None:
    from fulltilt.recipes.cod.trainer import structure_loss

    mask = (torch.rand(2, 1, 384, 384, device="cuda") > 0.7).float()
    weight = torch.ones(1, 1, 1, 1, device="cuda", requires_grad=True)
    with torch.autocast("cuda", dtype=torch.float16):
        value = structure_loss(torch.nn.functional.conv2d((mask * 2 - 1) * 500, weight), mask)
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(weight.grad).all()


# Both runs in one process, as a benchmark or a notebook has them; a crash of the first would show in the second too.
TWO_RUNS = """
import sys
from fulltilt.cli import main as command

for given in (["--max-steps", "20"], ["--epochs", "12", "--fresh"]):
    try:
        command.main(["train", "hdf5", *sys.argv[1:], *given])
    except SystemExit as ended:
        assert not ended.code, ended.code
"""


def test_hdf5_trains_a_thousand_steps_from_vram_while_it_is_recorded_and_ends_whole(tmp_path: Path) -> None:
    """A benchmark of this job once died of a segmentation fault: workers forked beside CUDA, rows read into VRAM by a
    thread, pinned memory given back while the GPU trains, the recorder's and NVML's threads looking on.
    """
    make_folder("hdf5", tmp_path / "data", 60_000, 0)
    flags = ("--batch-size", "512", "--workers", "8", "--residency", "vram", "--use-specaugment")
    places = ("--data", tmp_path / "data", "--out", tmp_path / "out")
    ran = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", TWO_RUNS, *places, *flags],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-6000:]
    shown = ran.stdout
    assert "kept in vram" in shown
    assert "Epoch 12/12:" in shown
    with (tmp_path / "out" / "metrics.csv").open() as file:
        assert float([*csv.DictReader(file)][-1]["eval_auroc"]) > 0.85
