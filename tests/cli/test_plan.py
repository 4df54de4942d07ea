"""`fulltilt plan` as a user calls it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fulltilt.cli.main import main
from tests.report import examples


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
