"""Scripts built like those of real projects: steps and samples as they count them themselves, and a ledger that closes.

The projects' own scripts were run too; what came out stands in docs/benchmarks/real-projects.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# Whole jobs of half a minute each: part of make test-zoo.
pytestmark = pytest.mark.slow

STRUCTURES = Path(__file__).parent / "structures"


@dataclass
class Observed:
    """What a script said of itself and what Fulltilt says of it."""

    truth: dict[str, Any]
    answer: dict[str, Any]
    ranks: list[dict[str, Any]]

    def bucket(self, name: str) -> float:
        return float(self.answer["ledger"]["buckets"][name])

    def loader(self, role: str) -> dict[str, Any]:
        (loader,) = (loader for loader in self.ranks[0]["loaders"] if loader["role"] == role)
        return loader  # type: ignore[no-any-return]


def observe(script: Path, folder: Path, *arguments: str) -> Observed:
    """Run a script under `fulltilt run` and hold the two accounts against each other."""
    command = [sys.executable, "-m", "fulltilt", "run", "--out", str(folder / "run"), "--", str(script), *arguments]
    done = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    seen = Observed(
        truth=json.loads(done.stdout.splitlines()[-1]),  # Gloo of torch 2.8 greets on standard output
        answer=json.loads((folder / "run" / "findings.json").read_text()),
        ranks=[json.loads(path.read_text()) for path in sorted((folder / "run").glob("rank-*.json"))],
    )
    throughput, ledger = seen.answer["throughput"], seen.answer["ledger"]
    assert {name: throughput[name] for name in ("steps", "samples")} == seen.truth
    assert sum(ledger["buckets"].values()) == pytest.approx(ledger["wall_s"], rel=1e-6)
    assert seen.bucket("unattributed_s") < 0.03 * ledger["wall_s"]
    return seen


def test_a_wrapped_loader_that_draws_one_batch_ahead(tmp_path: Path) -> None:
    seen = observe(STRUCTURES / "draws_ahead.py", tmp_path)
    assert seen.loader("train")["batches"] == 38  # one more than was trained on
    assert seen.loader("eval")["batches"] == 15
    assert seen.bucket("validation_s") > 0


def test_a_job_that_never_calls_backward(tmp_path: Path) -> None:
    seen = observe(STRUCTURES / "without_backward.py", tmp_path)
    trained_s = seen.answer["ledger"]["wall_s"] - seen.bucket("startup_s")
    assert seen.bucket("compute_s") > 0.6 * trained_s
    # It was all start-up up to the end.
    assert trained_s > 0.5 * seen.truth["steps"] / seen.answer["throughput"]["steps_per_s"]


@pytest.mark.parametrize("gradients", ["func", "autograd"])
def test_a_job_without_an_optimizer_that_never_calls_backward(tmp_path: Path, gradients: str) -> None:
    """Three quarters of it were unattributed, and no training was seen."""
    seen = observe(STRUCTURES / "without_optimizer.py", tmp_path, gradients)
    assert seen.bucket("data_wait_s") > 1200 * 0.0005 * 0.95


def test_a_job_with_neither_loader_nor_optimizer_nor_backward(tmp_path: Path) -> None:
    """It was said that nothing trained."""
    seen = observe(STRUCTURES / "without_optimizer.py", tmp_path, "without a loader")
    assert seen.bucket("compute_s") > 0.8 * (seen.answer["ledger"]["wall_s"] - seen.bucket("startup_s"))


def test_a_loader_that_never_ends_behind_a_generator(tmp_path: Path) -> None:
    seen = observe(STRUCTURES / "never_ending_loader.py", tmp_path)
    assert seen.loader("train")["passes"] == 1
    assert seen.bucket("data_wait_s") > seen.bucket("compute_s")


def test_a_trainer_that_skips_batches_and_draws_before_it_leaves_evaluation(tmp_path: Path) -> None:
    seen = observe(STRUCTURES / "trainer_resumed.py", tmp_path)
    roles = [loader["role"] for loader in seen.ranks[0]["loaders"]]
    assert (roles.count("train"), set(roles)) == (2, {"train", "eval"})
    assert seen.bucket("checkpoint_s") > 0


def test_a_validation_before_training_and_modes_put_back_by_hand(tmp_path: Path) -> None:
    seen = observe(STRUCTURES / "sanity_check.py", tmp_path)
    assert seen.loader("eval")["batches"] == seen.loader("eval")["eval_batches"] == 3 + 9 * 5
    assert "eval_batches" not in seen.loader("train")
    assert 0 < seen.bucket("validation_s") < seen.bucket("compute_s")


def test_a_loop_without_a_loader_that_estimates_its_loss(tmp_path: Path) -> None:
    seen = observe(STRUCTURES / "no_loader.py", tmp_path)
    assert seen.bucket("validation_s") > 0
    assert seen.ranks[0]["backwards"] == 202


def test_spawned_workers_are_measured_and_are_no_ranks(tmp_path: Path) -> None:
    seen = observe(STRUCTURES / "spawned_workers.py", tmp_path)
    (workers,) = seen.ranks[0]["workers"]
    assert (workers["processes"], workers["batches"]) == (1, 15)
    assert workers["lines"][0]["call"] == "time.sleep(0.005)"
    assert seen.loader("train")["start_method"] == "spawn"


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_ranks_that_the_script_itself_starts(tmp_path: Path, start_method: str) -> None:
    seen = observe(STRUCTURES / "own_ranks.py", tmp_path, start_method)
    assert [(rank["rank"], rank["world_size"], rank["steps"]) for rank in seen.ranks] == [(0, 2, 18), (1, 2, 18)]


def test_a_model_compiled_as_one_graph_stays_one_graph(tmp_path: Path) -> None:
    seen = observe(STRUCTURES / "compiled.py", tmp_path)
    assert seen.ranks[0]["precision"]["compiled"]


def test_a_stream_over_workers(tmp_path: Path) -> None:
    seen = observe(STRUCTURES / "streamed.py", tmp_path)
    assert seen.loader("train")["iterable"]
    assert seen.ranks[0]["workers"][0]["batches"] == seen.truth["steps"]  # the end of a stream is no batch


def test_two_loaders_side_by_side_are_counted_alike_in_a_pause(tmp_path: Path) -> None:
    seen = observe(STRUCTURES / "side_by_side.py", tmp_path)
    assert [loader["samples"] for loader in seen.ranks[0]["loaders"]] == [9600, 28800]


@pytest.mark.parametrize("where", ["here", "thread"])
def test_optimizers_that_step_inside_backward(tmp_path: Path, where: str) -> None:
    seen = observe(STRUCTURES / "steps_in_backward.py", tmp_path, where)
    assert seen.ranks[0]["optimizer_calls"] > 4 * 300
    assert seen.loader("train")["batches"] == seen.truth["steps"]
    trained_s = seen.answer["ledger"]["wall_s"] - seen.bucket("startup_s")
    assert seen.bucket("compute_s") > (0.6 if where == "here" else 0.3) * trained_s  # a thread takes long to start


def test_batches_through_a_queue_beside_an_evaluating_thread(tmp_path: Path) -> None:
    """The wait was the script's own code, and most of the training was called validation."""
    seen = observe(STRUCTURES / "own_threads.py", tmp_path)
    assert seen.bucket("validation_s") == 0
    waited_s = json.loads((tmp_path / "seconds.json").read_text())["waited"]
    assert seen.bucket("data_wait_s") == pytest.approx(waited_s, rel=0.2)
    finding = seen.answer["findings"][0]
    assert (finding["code"], finding["where"]) == ("input_serial", "own_threads.py:41")


def test_a_slow_sampler_is_named_whatever_the_workers(tmp_path: Path) -> None:
    """The advice was to fetch without workers, where the sampler takes as long."""
    seen = observe(STRUCTURES / "slow_sampler.py", tmp_path)
    finding = seen.answer["findings"][0]
    assert (finding["code"], finding["where"]) == ("input_serial", "slow_sampler.py:18")
    assert " at slow_sampler.py:18 runs in the training thread: " in finding["fix"]


@pytest.mark.quiet
def test_short_stretches_of_python_between_calls_of_torch_are_the_scripts_own(tmp_path: Path) -> None:
    seen = observe(STRUCTURES / "rollouts.py", tmp_path)
    true = json.loads((tmp_path / "seconds.json").read_text())
    # Half of it was taken for the torch calls behind them.
    assert seen.bucket("host_code_s") / true["training"] == pytest.approx(
        true["environment"] / true["training"], abs=0.12
    )
    (place,) = {finding["where"] for finding in seen.answer["findings"] if finding["code"] == "host_code"}
    assert place in ("rollouts.py:20", "rollouts.py:21")


def test_a_script_draws_the_same_random_numbers_as_without(tmp_path: Path) -> None:
    script = str(STRUCTURES / "random_numbers.py")
    plain, observed = (
        subprocess.Popen([sys.executable, *command, script], cwd=tmp_path, stdout=subprocess.PIPE)
        for command in ([], ["-m", "fulltilt", "run", "--out", "run", "--"])
    )
    assert observed.communicate(timeout=120)[0] == plain.communicate(timeout=120)[0] != b""
    assert observed.returncode == 0
    assert json.loads((tmp_path / "run" / "findings.json").read_text())["throughput"]["samples"] == 320


LIBRARY = """
import time
import torch
from torch.utils.data import DataLoader

class Trainer:
    def __init__(self, model, dataset):
        self.model, self.dataset = model, dataset

    def fit(self):
        optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.steps = self.samples = 0
        for _epoch in range(4):
            for (inputs,) in DataLoader(self.dataset, batch_size=8):
                self.model(inputs).square().mean().backward()
                optimizer.step()
                self.tell()
                self.steps += 1
                self.samples += len(inputs)

    def tell(self):
        time.sleep(0.02)
"""

CALLS_IT = """
import json, sys
sys.path.insert(0, "site-packages")
import torch
from trainerlib import Trainer

class Slow(torch.utils.data.TensorDataset):
    def __getitem__(self, index):
        total = sum(i * i for i in range(20_000))
        return super().__getitem__(index)

torch.set_num_threads(1)
trainer = Trainer(torch.nn.Linear(64, 4), Slow(torch.randn(40, 64)))
trainer.fit()
print(json.dumps({"steps": trainer.steps, "samples": trainer.samples}))
"""


def test_where_a_library_owns_the_loop_its_lines_are_named_and_the_scripts_for_its_loader(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "trainerlib"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(LIBRARY)
    (tmp_path / "train.py").write_text(CALLS_IT)
    seen = observe(tmp_path / "train.py", tmp_path)
    rank = seen.ranks[0]
    fit = CALLS_IT.splitlines().index("trainer.fit()") + 1
    assert (rank["host_lines"][0]["where"], rank["host_lines"][0]["function"]) == (
        f"trainerlib/__init__.py:{LIBRARY.splitlines().index('        time.sleep(0.02)') + 1}",
        "Trainer.tell",
    )
    train = seen.loader("train")
    assert (train["where"], train["made_by"], train["passes"]) == (f"train.py:{fit}", "trainerlib", 4)
    (fetching,) = rank["workers"]
    assert fetching["lines"][0]["function"].startswith("Slow.__getitem__")
