import os
import subprocess
import sys
from pathlib import Path

import pytest

from fulltilt.probes.cgroup import MemoryGroup, cpu_quota, oom_kills
from fulltilt.probes.host import cpu_capacity, memory_headroom_bytes, memory_limit_bytes
from fulltilt.testing import GroupLimits, write_cgroups

GIB = 1024**3
VERSIONS = ("v1", "v2", "hybrid")


@pytest.mark.parametrize("version", VERSIONS)
def test_half_a_cpu_is_half_a_cpu(tmp_path, version):
    root = write_cgroups(tmp_path, version, {"/": GroupLimits(), "/job": GroupLimits(cpus=0.5)})
    capacity = cpu_capacity(root)
    assert (capacity.quota, capacity.usable) == (0.5, 0.5)
    assert capacity.present >= capacity.affinity >= 1


@pytest.mark.parametrize("version", VERSIONS)
def test_the_tightest_group_above_decides(tmp_path, version):
    groups = {"/": GroupLimits(), "/pod": GroupLimits(cpus=0.25), "/pod/job": GroupLimits(cpus=4)}
    assert cpu_quota(write_cgroups(tmp_path, version, groups)) == 0.25


@pytest.mark.parametrize("version", VERSIONS)
def test_without_a_quota_affinity_decides(tmp_path, version):
    capacity = cpu_capacity(write_cgroups(tmp_path, version, {"/": GroupLimits(), "/job": GroupLimits()}))
    assert capacity.quota is None
    assert capacity.usable == capacity.affinity


@pytest.mark.parametrize("version", VERSIONS)
def test_a_quota_above_the_affinity_does_not_add_cpus(tmp_path, version):
    capacity = cpu_capacity(write_cgroups(tmp_path, version, {"/": GroupLimits(cpus=4096)}))
    assert capacity.quota == 4096
    assert capacity.usable == capacity.affinity


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_container_sees_the_hosts_path_but_only_its_own_part_of_the_tree(tmp_path, version):
    groups = {"/": GroupLimits(cpus=1.5, memory_bytes=GIB)}
    root = write_cgroups(tmp_path, version, groups, own="/docker/abc", shows="/docker/abc")
    assert cpu_quota(root) == 1.5
    assert memory_limit_bytes(root) == GIB


@pytest.mark.parametrize("own", ["/../../elsewhere", "/gone", "/docker/abcdef"])
def test_a_group_outside_of_what_is_mounted_falls_back_to_the_top(tmp_path, own):
    root = write_cgroups(tmp_path, "v2", {"/": GroupLimits(cpus=2)}, own=own, shows="/docker/abc")
    assert cpu_quota(root) == 2.0


@pytest.mark.parametrize("content", ["", "nonsense", "0 100000", "-5 100000", "50000 0", "1 2 3"])
def test_a_damaged_quota_is_no_quota(tmp_path, content):
    root = write_cgroups(tmp_path, "v2", {"/": GroupLimits(cpus=1)})
    (root / "sys/fs/cgroup/cpu.max").write_text(content)
    assert cpu_quota(root) is None


def test_without_proc_there_is_no_limit(tmp_path):
    assert cpu_quota(tmp_path) is None
    assert memory_limit_bytes(tmp_path) is None
    assert memory_headroom_bytes(tmp_path) > 0
    assert cpu_capacity(tmp_path).usable >= 1


# --------------------------------------------------------------------------- memory


@pytest.mark.parametrize("version", VERSIONS)
def test_the_tightest_memory_limit_counts_and_cache_is_not_use(tmp_path, version):
    groups = {
        "/": GroupLimits(),
        "/pod": GroupLimits(memory_bytes=2 * GIB, used_bytes=GIB, cache_bytes=GIB // 4),
        "/pod/job": GroupLimits(memory_bytes=3 * GIB, used_bytes=GIB // 2),
    }
    root = write_cgroups(tmp_path, version, groups)
    assert memory_limit_bytes(root) == 2 * GIB
    assert MemoryGroup.find(root).used_bytes() == GIB * 3 // 4
    assert memory_headroom_bytes(root) == pytest.approx(2 * GIB - GIB * 3 // 4)


@pytest.mark.parametrize("version", VERSIONS)
def test_no_limit_is_none_and_not_a_huge_number(tmp_path, version):
    root = write_cgroups(tmp_path, version, {"/": GroupLimits(), "/job": GroupLimits()})
    assert memory_limit_bytes(root) is None


@pytest.mark.parametrize("version", VERSIONS)
def test_a_limit_above_the_machines_memory_is_no_limit(tmp_path, version):
    root = write_cgroups(tmp_path, version, {"/": GroupLimits(memory_bytes=2**55)})
    assert memory_limit_bytes(root) is None


# --------------------------------------------------------------------------- a real control group

SAY_USABLE = "from fulltilt.probes.host import cpu_capacity; print(cpu_capacity().usable)"


def make_group(name):
    """A real group with half a CPU, of version 1 or 2, and the file that takes processes into it."""
    first, second = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    if (first / "cpu.cfs_quota_us").exists() or (first / "cgroup.procs").exists():
        group = first / name
        group.mkdir()
        (group / "cpu.cfs_quota_us").write_text("50000")
    else:
        group = second / name
        group.mkdir()
        (group / "cpu.max").write_text("50000 100000")
    return group


@pytest.fixture
def half_a_cpu():
    name = f"fulltilt-test-{os.getpid()}"
    candidates = [Path("/sys/fs/cgroup/cpu") / name, Path("/sys/fs/cgroup") / name]
    try:
        yield make_group(name)
    except OSError as error:
        pytest.skip(f"NO REAL CONTROL GROUP was tested: this machine does not let us make one ({error})")
    finally:
        for group in candidates:
            if group.is_dir():
                group.rmdir()  # its only process has ended


def test_in_a_real_group_with_half_a_cpu_a_process_says_half(half_a_cpu):
    script = f"import os; open({str(half_a_cpu / 'cgroup.procs')!r}, 'w').write(str(os.getpid())); {SAY_USABLE}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "0.5", done.stderr


@pytest.mark.parametrize(
    ("version", "file", "told"),
    [
        ("v2", "job/memory.events", "low 0\nhigh 0\nmax 812\noom 4\noom_kill 3\noom_group_kill 0\n"),
        ("v1", "memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"),
    ],
)
def test_kills_for_lack_of_memory_are_those_of_our_own_group(tmp_path, version, file, told):
    root = write_cgroups(tmp_path, version, {"/": GroupLimits(), "/job": GroupLimits(memory_bytes=GIB)})
    (root / "proc/vmstat").write_text("nr_free_pages 812\noom_kill 7\n")
    (root / "sys/fs/cgroup" / file).write_text(told)
    assert oom_kills(root) == 3


def test_kills_for_lack_of_memory_are_the_machines_where_no_group_counts_them(tmp_path):
    root = write_cgroups(tmp_path, "v2", {"/": GroupLimits(), "/job": GroupLimits()})
    assert oom_kills(root) is None
    (root / "proc/vmstat").write_text("nr_free_pages 812\noom_kill 7\npgalloc 3\n")
    assert oom_kills(root) == 7
