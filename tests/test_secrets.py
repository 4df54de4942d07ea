"""Secrets are masked before anything is written."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fulltilt.records.secrets import mask_arguments, mask_config, mask_text

RANDOM = "9dK2mXq7LrT4vBn8ZsYw3Hc6"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["train.py", "--api-key=abc"], ["train.py", "--api-key=***"]),
        (["train.py", "--token", "abc", "--lr", "1e-3"], ["train.py", "--token", "***", "--lr", "1e-3"]),
        (["--wandbApiKey", "abc"], ["--wandbApiKey", "***"]),
        (["logger.wandb.api_key=abc"], ["logger.wandb.api_key=***"]),
        (["HF_TOKEN=abc", "train.py"], ["HF_TOKEN=***", "train.py"]),
        (["--db", "postgres://me:pw@host/x"], ["--db", "postgres://me:***@host/x"]),
        (["--password", "hunter2"], ["--password", "***"]),
        (["--x", RANDOM], ["--x", "***"]),
        ([f"s3://bucket/{RANDOM}"], ["s3://bucket/***"]),
        (["--x", "hf_" + "a1B2" * 8], ["--x", "***"]),
        (["--wandb", "0123456789abcdef0123456789abcdef01234567"], ["--wandb", "***"]),
    ],
)
def test_secret_arguments_are_masked(given: list[str], kept: list[str]) -> None:
    assert list(mask_arguments(given)) == kept
    assert list(mask_arguments(kept)) == kept


@pytest.mark.parametrize(
    "arguments",
    [
        ["train.py", "--tokenizer", "bert-base-uncased", "--max-tokens", "512", "--pad-token", "<pad>"],
        ["--image-key", "image", "--monitor_key=val_loss", "--lr", "-1e-3", "--auth", "false"],
        ["--data", "/data/imagenet/train/2026-11-16_run12_resnet50_adamw_lr0.001", "--batch-size", "64"],
        ["--revision", "0123456789abcdef0123456789abcdef01234567"],
        ["python", "-m", "torch.distributed.run", "--nproc_per_node=8", "scripts/train_car_clip.py"],
        ["--checkpoint-dir", "checkpoints/convnextv2_base.fcmae_ft_in22k_in1k_384"],
        ["torchrun", "--rdzv-endpoint=localhost:29500", "--rdzv-id=job_2026_11_16"],
    ],
)
def test_ordinary_arguments_are_kept(arguments: list[str]) -> None:
    assert list(mask_arguments(arguments)) == arguments


def test_configs_and_lines_of_code_are_masked() -> None:
    config = {"lr": 0.1, "hub": {"token": "abc", "repo": "me/model"}, "keys": ["a", "b"], "password": 1234}
    assert mask_config(config) == {"lr": 0.1, "hub": {"token": "***", "repo": "me/model"}, "keys": ["***", "***"]} | {
        "password": 1234
    }
    assert mask_text('wandb.login(key="abc1")') == 'wandb.login(key="***")'
    assert mask_text(f"client = Client('{RANDOM}')") == "client = Client('***')"
    assert mask_text("for token in tokens: mask[token] = key") == "for token in tokens: mask[token] = key"
    assert mask_text("x = torch.zeros(3, dtype=torch.float32)") == "x = torch.zeros(3, dtype=torch.float32)"


def test_users_own_patterns_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLTILT_SECRETS", r"customer  proj-\d+")
    assert mask_arguments(["--customer", "acme", "--x=proj-17"]) == ("--customer", "***", "--x=***")


def test_run_folder_holds_no_secret_and_is_private(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nprint(sys.argv[1:])\n")
    command = [
        sys.executable,
        "-m",
        "fulltilt",
        "run",
        "--out",
        "run",
        "train.py",
        "--api-key=hunter2",
        "--token",
        "xyzzy",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120)
    assert "['--api-key=hunter2', '--token', 'xyzzy']" in done.stdout
    for path in (tmp_path / "run").iterdir():
        text = path.read_text()
        assert "hunter2" not in text, path
        assert "xyzzy" not in text, path
        if path.name != ".fulltilt":
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    shown = [sys.executable, "-m", "fulltilt", "report", "run", "--json"]
    answer = subprocess.run(shown, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(answer.stdout)["run"]["command"][-3:] == ["--api-key=***", "--token", "***"]
