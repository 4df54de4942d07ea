"""Small real jobs of libraries that nobody here wrote: cause, counts and the fix in the library's own words.

`make test-clients` installs the libraries and runs this; each job takes some seconds, most of them to import.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fulltilt import store

JOBS = Path(__file__).parent / "jobs"
LONGEST_S = 400
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * LONGEST_S)]


@dataclass(frozen=True)
class Client:
    """A job, the first finding that it should get, and words that the fix should have."""

    script: str
    library: str
    code: str
    fix: str
    validates: bool = False
    generates: bool = False  # in evaluation mode: the first few times it looks like a validation
    samples: bool = True  # whether samples are counted: not where nothing shows what a batch is


CLIENTS = (
    Client("torchdata_stateful", "torchdata", "input_serial", "num_workers=", validates=True),
    Client("torchdata_nodes", "torchdata", "input_serial", "ParallelMapper("),
    Client("fastai_learner", "fastai", "input_serial", "in DataBlock.dataloaders(...)", validates=True),
    Client("ultralytics_detect", "ultralytics", "input_serial", "model.train(..., workers=", validates=True),
    Client("lightning_fit", "lightning", "input_serial", "num_workers=", validates=True),
    Client("transformers_trainer", "transformers", "input_serial", "TrainingArguments(..., dataloader_num_workers="),
    Client("accelerate_loop", "accelerate", "input_serial", "DataLoader(..., num_workers="),
    Client("skorch_fit", "skorch", "input_serial", "NeuralNet(..., iterator_train__num_workers="),
    Client("geometric_graphs", "torch_geometric", "input_serial", "DataLoader(..., num_workers="),
    Client("webdataset_shards", "webdataset", "input_serial", "DataLoader(..., num_workers="),
    Client("litdata_streaming", "litdata", "input_serial", "num_workers="),
    Client("monai_transforms", "monai", "input_serial", "DataLoader(..., num_workers="),
    Client("timm_loader", "timm", "input_serial", "create_loader(..., num_workers="),
    Client(
        "sentence_transformers_fit",
        "sentence_transformers",
        "input_serial",
        "SentenceTransformerTrainingArguments(..., dataloader_num_workers=",
    ),
    Client("keras_torch", "keras", "input_serial", "workers=", validates=True),
    Client("stable_baselines3_ppo", "stable_baselines3", "host_code", "SubprocVecEnv", samples=False),
    Client("datasets_streaming", "datasets", "input_serial", "DataLoader(dataset, "),
    Client(
        "transformers_streaming",
        "transformers",
        "input_serial",
        "TrainingArguments(..., dataloader_num_workers=",
        validates=True,
    ),
    Client("webdataset_direct", "webdataset", "input_serial", "webdataset.WebLoader("),
    Client("keras_loader", "keras", "input_serial", "DataLoader(..., num_workers=", validates=True),
    Client("stable_baselines3_dqn", "stable_baselines3", "host_code", "SubprocVecEnv", samples=False),
    Client("generation", "torch", "input_serial", "num_workers=", generates=True),
    Client("trl_grpo", "trl", "host_code", "trl_grpo.py:22", samples=False),
)
# Without workers, with random augmentation: what users of most libraries have.
AUGMENTED = ("lightning_fit", "transformers_trainer", "accelerate_loop", "skorch_fit", "monai_transforms")


def run(script: str, folder: Path, *flags: str, **environment: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the job has counted, and Fulltilt's answer."""
    command = [sys.executable, "-m", "fulltilt", "run", "--out", str(folder), *flags, "--"]
    ended = subprocess.run(
        [*command, sys.executable, f"{script}.py"],
        cwd=JOBS,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    counted = next(line for line in ended.stdout.splitlines() if "COUNTED " in line).partition("COUNTED ")[2]
    return json.loads(counted), store.read_json(folder / store.FINDINGS_FILE)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.script)
def test_job_of_a_library_is_explained(client: Client, tmp_path: Path) -> None:
    if importlib.util.find_spec(client.library) is None:
        pytest.skip(f"{client.library} is not installed (make test-clients)")
    counted, answer = run(client.script, tmp_path / "run")
    found = answer["findings"][0]
    seconds = answer["ledger"]["buckets"]
    assert answer["throughput"]["steps"] == counted["steps"]
    assert answer["throughput"]["samples"] == counted["samples"] or not client.samples
    assert found["code"] == client.code, found
    assert client.fix in found["fix"]
    assert "site-packages" not in found["fix"]
    assert found["where"].startswith((client.script, "slow_data"))
    if client.generates:
        assert seconds["validation_s"] < 0.2 * seconds["compute_s"], seconds
    else:
        assert (seconds["validation_s"] > 0.02) == client.validates, seconds


@pytest.mark.parametrize("script", AUGMENTED)
def test_augmented_job_is_tuned_with_the_same_samples_in_order(script: str, tmp_path: Path) -> None:
    library = next(client.library for client in CLIENTS if client.script == script)
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed (make test-clients)")
    plain, before = run(script, tmp_path / "plain", AUGMENT="1", EPOCHS="6")
    tuned, after = run(script, tmp_path / "tuned", "--auto", AUGMENT="1", EPOCHS="6")
    assert tuned["order"] == plain["order"]
    assert after["ledger"]["buckets"]["data_wait_s"] < 0.8 * before["ledger"]["buckets"]["data_wait_s"]
    assert "same distribution" in json.dumps(after)
