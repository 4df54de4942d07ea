import os
import subprocess
import sys
from pathlib import Path

import pytest

from fulltilt.probes.gpu import GpuProcesses
from fulltilt.probes.nvml import Nvml
from fulltilt.testing import FakeNvml, t4

OURS = os.getpid()
GONE = 2**22 + 1  # above the largest number that Linux gives a process


@pytest.fixture
def child():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.communicate(b"\n", timeout=20)


def tenants(processes, proc, root_pid=OURS):
    fake = FakeNvml([t4(processes=processes)])
    nvml = Nvml(fake)
    nvml.start()
    return fake, GpuProcesses(nvml, root_pid, proc)


def read(processes, proc, root_pid=OURS):
    fake, found = tenants(processes, proc, root_pid)
    return {process.pid: process.ours for process in found.read(fake.gpus[0])}


def container(tmp_path, gpu_users=()):
    """A /proc of a PID namespace of its own, in which some processes have a GPU open."""
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").touch()
    for pid in gpu_users:
        (tmp_path / str(pid) / "fd").mkdir(parents=True)
        (tmp_path / str(pid) / "fd/7").symlink_to("/dev/nvidia0")
    return tmp_path


def test_a_child_is_ours_from_the_first_moment(tmp_path, child):
    assert read(((OURS, 1), (child.pid, 1)), tmp_path) == {OURS: True, child.pid: True}


def test_a_parent_is_not_ours(tmp_path, child):
    assert read(((OURS, 1), (child.pid, 1)), tmp_path, root_pid=child.pid) == {OURS: False, child.pid: True}


def test_where_numbers_agree_every_process_outside_of_the_tree_is_foreign(tmp_path):
    assert read(((OURS, 1), (GONE, None)), tmp_path) == {OURS: True, GONE: False}, "Windows has no /proc"


def test_number_zero_is_never_foreign(tmp_path):
    assert read(((0, 1),), tmp_path) == {0: True}


def test_in_a_container_a_number_that_cannot_be_found_is_not_called_foreign(tmp_path):
    assert read(((OURS, 1), (GONE, 1), (0, 1)), container(tmp_path)) == {OURS: True, GONE: True, 0: True}


def test_in_a_container_a_neighbour_that_has_the_gpu_open_is_foreign(tmp_path, child):
    proc = container(tmp_path, gpu_users=[OURS])
    assert read(((OURS, 1),), proc, root_pid=child.pid) == {OURS: False}


def test_in_a_container_a_number_that_means_another_process_here_is_not_called_foreign(tmp_path, child):
    proc = container(tmp_path)
    (proc / f"{OURS}/fd").mkdir(parents=True)
    (proc / f"{OURS}/fd/1").symlink_to("/dev/null")
    assert read(((OURS, 1),), proc, root_pid=child.pid) == {OURS: True}


def test_memory_of_a_process_on_two_lists_is_counted_once_and_may_be_unknown(tmp_path):
    fake, found = tenants(((OURS, 5), (OURS, 7), (GONE, None)), tmp_path)
    assert [process.vram_used_bytes for process in found.read(fake.gpus[0])] == [7, None]


def test_a_process_is_looked_at_once(tmp_path, monkeypatch):
    fake, found = tenants(((GONE, 1),), tmp_path)
    for _ in range(5):
        found.read(fake.gpus[0])
    assert fake.calls["nvmlSystemGetProcessName"] == 1


def test_this_machine_answers_one_way_or_the_other():
    assert read(((OURS, 1),), Path("/proc")) == {OURS: True}
