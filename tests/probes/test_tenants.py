import os
from pathlib import Path

from fulltilt.probes.nvml import Nvml
from fulltilt.probes.tenants import Tenants
from fulltilt.probes.tree import ProcessTree
from fulltilt.testing import FakeNvml, t4

OURS = os.getpid()


def read(processes, proc):
    fake = FakeNvml([t4(processes=processes)])
    nvml = Nvml(fake)
    nvml.start()
    return {p.pid: p.ours for p in Tenants(nvml, ProcessTree(OURS), proc).read(fake.gpus[0])}


def container(tmp_path, gpu_users=()):
    """A /proc of a PID namespace of its own, in which some processes have a GPU open."""
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").touch()
    for pid in gpu_users:
        (tmp_path / str(pid) / "fd").mkdir(parents=True)
        (tmp_path / str(pid) / "fd/7").symlink_to("/dev/nvidia0")
    return tmp_path


def test_in_a_container_a_number_that_cannot_be_found_is_not_called_foreign(tmp_path):
    assert read(((OURS, 1), (3_999_999, 1), (0, 1)), container(tmp_path)) == {OURS: True, 3_999_999: True, 0: True}


def test_in_a_container_a_neighbour_that_has_the_gpu_open_is_foreign(tmp_path):
    assert read(((3_999_999, 1),), container(tmp_path, gpu_users=[3_999_999])) == {3_999_999: False}


def test_in_a_container_a_number_that_means_another_process_here_is_not_called_foreign(tmp_path):
    proc = container(tmp_path)
    (proc / "3999999/fd").mkdir(parents=True)
    (proc / "3999999/fd/1").symlink_to("/dev/null")
    assert read(((3_999_999, 1),), proc) == {3_999_999: True}


def test_where_numbers_agree_every_process_outside_of_the_tree_is_foreign(tmp_path):
    assert read(((OURS, 1), (3_999_999, None)), tmp_path) == {OURS: True, 3_999_999: False}, "Windows has no /proc"


def test_number_zero_is_never_foreign(tmp_path):
    assert read(((0, 1),), tmp_path) == {0: True}


def test_this_machine_answers_one_way_or_the_other():
    assert read(((OURS, 1),), Path("/proc")) == {OURS: True}
