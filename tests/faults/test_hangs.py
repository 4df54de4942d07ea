"""Loader workers that die or hang, a collective that nobody joins, weights that drift apart."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import shutil
import signal
import subprocess
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from fulltilt.errors import MachineError
from fulltilt.train.config import TrainSettings
from fulltilt.train.guards import explain_dead_worker
from fulltilt.train.loop import train
from fulltilt.train.train_state import StepEnd
from tests.faults import victim
from tests.faults.ranks import exit_codes
from tests.faults.victim import Order


class Deadly(victim.NoisySamples):
    """The worker that fetches sample 22 meets its end there."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def __getitem__(self, index: int) -> Any:
        if index == 22:
            if self.how == "exit":
                os._exit(1)
            if self.how == "sleep":
                time.sleep(600)
            os.kill(os.getpid(), getattr(signal, self.how))
        return super().__getitem__(index)


def deadly(order: Order) -> dict[str, Any]:
    return {"data": Deadly(order.note)}


@pytest.mark.parametrize("residency", ["none", "auto"])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("exit", "a loader worker died"),
        ("SIGKILL", "OOM killer"),
        ("SIGBUS", "/dev/shm is too small"),
    ],
)
def test_a_worker_dies(how: str, words: str, residency: str, tmp_path: Path) -> None:
    """Seen to fail: without the `except` of `MapSource._read` the exit code is 1 and the cause is torch's
    "DataLoader worker … exited unexpectedly"; with the feed, without `worker_died` in its pool, the run hangs."""
    settings = {"workers": 1, "residency": residency}
    assert victim.exit_code(Order(tmp_path, settings, prepare=deadly, note=how)) == 7
    errors = (tmp_path / "stderr.0.txt").read_text()
    ours = errors[errors.index("fulltilt:") :]
    assert words in ours
    assert "workers" in ours
    assert len(ours.splitlines()) <= 3
    assert "Traceback" not in ours


class Pictures(torch.utils.data.Dataset[torch.Tensor]):
    """Samples of 4 MiB."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2**20,), float(index))


def first_pixels(model: torch.nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return model(batch[:, :6]).mean(), {}


def small_shared_memory(order: Order) -> dict[str, Any]:
    """As in a container: this process and its workers see a /dev/shm of 64 MiB."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(0x20000) == 0, "a new mount namespace"
    assert libc.mount(None, b"/", None, 16384 | 1 << 18, None) == 0, "changes stay in it"
    assert libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=64m") == 0
    return {"data": Pictures(), "eval_data": None, "loss": first_pixels}


@pytest.mark.slow
@pytest.mark.parametrize(("residency", "code"), [("none", 7), ("auto", 0)])
def test_a_container_with_64_mib_of_shared_memory(residency: str, code: int) -> None:
    """Four batches of 32 MiB ahead are too many for torch's loader; the feed hands them over without /dev/shm."""
    mount = ["unshare", "--mount", "mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", "/dev/shm"]
    if not shutil.which("unshare") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces for this user")
    settings = {"workers": 2, "residency": residency, "epochs": 1, "monitor": None, "monitor_mode": "max"}
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # tmp_path lies in /dev/shm here
        out = Path(folder)
        assert victim.exit_code(Order(out, settings, prepare=small_shared_memory)) == code, victim.told(out)
        errors = (out / "stderr.0.txt").read_text()
    if code:
        ours = errors[errors.index("fulltilt:") :]
        assert "/dev/shm is too small" in ours
        assert len(ours.splitlines()) <= 3


def test_a_death_that_torch_tells_in_the_middle_of_a_step_is_explained(tmp_path: Path) -> None:
    """Seen to fail: without the `except RuntimeError` of `Loop.run` torch's own error comes through."""

    def told(_: StepEnd) -> None:
        raise RuntimeError("DataLoader worker (pid 9) is killed by signal: Killed. ")

    with pytest.raises(MachineError, match="OOM killer"):
        train(victim.make_job(), TrainSettings(device="cpu", record=False), tmp_path, on_step=told)

    def another(_: StepEnd) -> None:
        raise RuntimeError("out of resource: shared memory")

    with pytest.raises(RuntimeError, match="out of resource"):
        train(victim.make_job(), TrainSettings(device="cpu", record=False), tmp_path, on_step=another)


def dead_process(code: int) -> Any:
    reader, writer = multiprocessing.Pipe()
    writer.close()
    return types.SimpleNamespace(sentinel=reader, exitcode=code)


def test_a_connection_that_a_dying_worker_broke_is_explained() -> None:
    explained = explain_dead_worker(ConnectionResetError(104, "Connection reset by peer"), [dead_process(-9)])
    assert explained is not None
    assert "OOM killer" in explained.what
    assert explain_dead_worker(FileNotFoundError(2, "No such file", "a.jpg"), [dead_process(0)]) is None


@pytest.mark.slow
def test_a_worker_hangs(tmp_path: Path) -> None:
    """Seen to fail: without `Watchdog._end_everything` the test's own time limit ends the job."""
    settings = {"workers": 1, "hang_timeout_s": 2.0}
    child = victim.start(Order(tmp_path, settings, prepare=deadly, note="sleep"))
    deadline = time.monotonic() + 40
    family: list[psutil.Process] = []
    while child.is_alive() and time.monotonic() < deadline:
        with contextlib.suppress(psutil.Error):  # it may end just now
            family = psutil.Process(child.pid).children(recursive=True) or family
        time.sleep(0.05)
    child.join(1)
    orphans = [process for process in family if process.is_running() and process.status() != "zombie"]
    for process in orphans:
        process.kill()
    child.kill()
    assert child.exitcode == 7
    assert family, "there was a worker"
    assert not orphans
    assert "no progress for 2 s while waiting for the data of step" in victim.told(tmp_path)
    stacks = (tmp_path / "stacks.rank-0.log").read_text()
    assert "in _epoch" in stacks, "the loop's own stack"
    assert "test_hangs.py" in stacks, "the worker's stack names the line that hangs"


def skip_a_collective(end: StepEnd) -> None:
    if end.step == 4 and end.state.group.info.rank == 1:
        time.sleep(600)


@pytest.mark.slow
def test_a_collective_that_one_rank_never_joins(tmp_path: Path) -> None:
    """Seen to fail: with the watchdogs off both ranks are alive at the end of the test."""
    settings = {"hang_timeout_s": 3.0}
    codes = exit_codes(tmp_path, 2, settings=settings, on_step=skip_a_collective)
    assert None not in codes
    assert 7 in codes
    assert all(code != 0 for code in codes)


def flip_a_weight(end: StepEnd) -> None:
    if end.step == 4 and end.state.group.info.rank == 1:
        with torch.no_grad():
            weight = end.state.model.first.weight
            weight.view(torch.int32)[3, 2] ^= 1 << 10  # the lowest may be rounded away by the next update


def test_replicas_drift(tmp_path: Path) -> None:
    """Seen to fail: without `TrainState.check_drift` both ranks end with code 0."""
    codes = exit_codes(tmp_path, 2, settings={"drift_every": 3}, on_step=flip_a_weight)
    assert codes == [7, 7]
    assert "the ranks' weights differ at step 6" in victim.told(tmp_path)


def test_healthy_replicas_pass(tmp_path: Path) -> None:
    assert exit_codes(tmp_path, 2, settings={"drift_every": 1, "epochs": 1}) == [0, 0]
