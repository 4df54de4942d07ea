"""Recipes and cache fills killed at any moment, again and again, until they end: nothing lost, nothing foreign changed.

`make test-kills` makes a thousand kills. KILLS says how many, KILL_SHARDS into how many tests of each job they are
divided (`-n` spreads them), and KILL_SEED draws other moments.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fulltilt import feed
from fulltilt.cli import main as command
from fulltilt.recipes.synthetic import make_folder
from fulltilt.train import checkpoint

KILLS = int(os.environ.get("KILLS", "1000"))
SHARDS = int(os.environ.get("KILL_SHARDS", "1"))
SEED = int(os.environ.get("KILL_SEED", "0"))
JOBS = ("cod", "carclip", "visobert", "hdf5", "cache")
COMMON = "--epochs 2 --save-every 2 --workers 0"
FLAGS = {
    "cod": "--backbone test_resnet --img-size 32 --decoder-width 16 --num-experts 2 --stage1-epochs 1 --batch-size 4 "
    "--stage2-batch-size 4",
    "carclip": "--model small --image-size 32 --batch-size 6",
    "visobert": "--batch-size 8 --vocab-size 200 --max-length 16 --hidden-size 32 --num-hidden-layers 1",
    "hdf5": "--batch-size 24 --width 8 --heads 2",
}
KINDS = {"cod": ("cod", 12), "carclip": ("cars", 24), "visobert": ("text", 64), "hdf5": ("hdf5", 120)}


class Slow(torch.utils.data.Dataset[torch.Tensor]):
    """Samples whose decoding takes long enough to be killed in."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.002)
        return torch.full((256,), float(index))


def fill_cache(out: Path) -> int:
    loader = feed.loader(Slow(), batch_size=8, residency="disk", cache_dir=out, cache_key="v1")
    for _ in range(2):
        for batch in loader:
            assert torch.equal(batch, batch[:, :1].expand_as(batch))
    return 0


def train(job: str, data: Path, out: Path) -> int:
    arguments = ["train", job, "--data", str(data), "--out", str(out), *FLAGS[job].split(), *COMMON.split()]
    try:
        command.main(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def forked(work: Callable[[], int], log: Path, modules: Path | None = None) -> int:
    """Start the work in a process group of its own; at its end it writes down the ``modules`` that it imported."""
    pid = os.fork()
    with contextlib.suppress(OSError):  # on both sides: whoever is first
        os.setpgid(pid, pid)
    if pid:
        return pid
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    code = 1
    try:
        code = work()
        if modules is not None:
            modules.write_text("\n".join(sys.modules))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ended_well(pid: int, log: Path) -> None:
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, log.read_text()


def import_all(modules: Path) -> None:
    """Import here what the job imports: most kills would fall into its imports otherwise."""
    for name in modules.read_text().splitlines():
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def weights(out: Path) -> str | None:
    found = checkpoint.newest_complete(out / "checkpoints").checkpoint
    if found is None:
        return None
    return hashlib.sha256((found.folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.slow
@pytest.mark.kills
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("job", JOBS)
def test_killed_again_and_again_it_ends_as_if_never_killed(job: str, shard: int, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    data = tmp_path / "data"
    if job in KINDS:
        kind, size = KINDS[job]
        make_folder(kind, data, size, 0)
    rng = random.Random(f"{job} {shard} {SEED}")
    wanted = -(-KILLS // (len(JOBS) * SHARDS))
    log = tmp_path / "log.txt"

    def work(out: Path) -> Callable[[], int]:
        return (lambda: fill_cache(out)) if job == "cache" else (lambda: train(job, data, out))

    modules = tmp_path / "modules.txt"
    ended_well(forked(work(tmp_path / "first"), log, modules), log)
    import_all(modules)
    began = time.monotonic()
    ended_well(forked(work(tmp_path / "whole"), log), log)
    whole_s = time.monotonic() - began
    expected = None if job == "cache" else weights(tmp_path / "whole")

    kills = completed = 0
    number = 0
    while kills < wanted or not completed:
        out, step, in_vain = tmp_path / f"out-{number}", -1, 0
        number += 1
        while True:
            pid = forked(work(out), log)
            # Longer after kills that fell before the next checkpoint: the machine may be busier than it was.
            time.sleep(rng.uniform(0.02, 1.1) * whole_s * (1 + in_vain / 10))
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                assert os.waitstatus_to_exitcode(status) == 0, log.read_text()
                completed += 1
                break
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            kills, in_vain = kills + 1, in_vain + 1
            foreign = out / "notes of mine.txt"
            if out.is_dir() and (out / ".fulltilt").exists() and not foreign.exists():
                foreign.write_text("mine")
            if job != "cache" and (out / "checkpoints").is_dir():
                found = checkpoint.newest_complete(out / "checkpoints").checkpoint
                assert found is not None or step < 0
                now = -1 if found is None else found.step
                assert now >= step, f"{step - now} steps lost"
                in_vain = in_vain if now == step else 0
                step = now
            if kills >= wanted + 50:
                break
        notes = out / "notes of mine.txt"
        assert not notes.exists() or notes.read_text() == "mine"
        if expected is not None and ended:
            assert weights(out) == expected
    print(f"{job}, shard {shard}: {kills} kills, {number} runs, {completed} completed, nothing lost")
    assert completed
