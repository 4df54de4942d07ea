"""`fulltilt plan` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fulltilt.cli.main import main
from tests.report import examples
from tests.tuning.test_plan import observed


def plan(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments])
    return int(ended.value.code or 0)


@pytest.mark.parametrize("metric", ["iou", "eval_iou"])
def test_a_target_goes_by_the_name_that_a_training_gives_its_metric(
    metric: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen to fail: `--target iou=0.75`, as the help writes it, knew no iou: a training's table has eval_iou."""
    examples.write_folder(tmp_path, examples.healthy()[0])
    rows = "".join(f"{epoch},60,{0.1 * epoch}\n" for epoch in range(1, 5))
    (tmp_path / "metrics.csv").write_text(f"epoch,seconds,eval_iou\n{rows}")
    assert plan(str(tmp_path), "--target", f"{metric}=0.75") == 0
    assert f"\n{metric}: " in capsys.readouterr().out


def test_a_metric_that_nobody_measured_is_told_with_those_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    examples.write_folder(tmp_path, examples.healthy()[0])
    (tmp_path / "metrics.csv").write_text("epoch,seconds,eval_iou\n1,60,0.1\n")
    assert plan(str(tmp_path), "--target", "dice=0.75") == 2
    told = capsys.readouterr().err
    assert "no history of dice" in told
    assert "There are: eval_iou" in told


def test_only_the_gpus_that_were_asked_for_with_the_keys_that_readers_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    examples.write_folder(tmp_path, observed(8))
    assert plan(str(tmp_path), "--gpu", "A100", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert {"batches", "gpus", "loading", "vram", "target", "forecast"} <= set(told)
    keys = {"gpu", "memory_gib", "largest_batch", "speed", "fits", "hours", "accumulation"}
    assert all(set(row) == keys for row in told["gpus"])
    assert [row["gpu"] for row in told["gpus"]] == ["A100 40GB", "A100 80GB"]


def test_a_gpu_that_is_not_known_is_told_with_those_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    examples.write_folder(tmp_path, examples.healthy()[0])
    assert plan(str(tmp_path), "--gpu", "Voodoo 2") == 2
    told = capsys.readouterr().err
    assert "--gpu Voodoo 2: not in the table" in told
    assert "RTX 4090" in told
