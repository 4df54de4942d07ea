import os
import subprocess
import sys
import time

import psutil
import pytest

from fulltilt.probes.host import (
    CoreTimes,
    Counters,
    HostProbe,
    ProcessTree,
    rates_between,
    read_counters,
    shared_memory_bytes,
)
from fulltilt.testing import FakeClock, GroupLimits, write_cgroups

GIB = 1024**3


def counters(at_s, *cores, swap=0, read=0, write=0):
    return Counters(at_s, tuple(CoreTimes(*core) for core in cores), swap, read, write)


def test_rates_are_means_between_two_readings():
    before = counters(10.0, (5.0, 10.0, 1.0), (0.0, 10.0, 0.0), read=1000)
    after = counters(12.0, (7.0, 12.0, 1.0), (0.5, 12.0, 1.0), swap=8192, read=5000, write=600)
    rates = rates_between(before, after)
    assert rates.cpu_per_core_pct == (100.0, 25.0)
    assert rates.cpu_pct == 62.5
    assert rates.iowait_pct == 25.0
    assert (rates.swap_in_bytes_per_s, rates.disk_read_bytes_per_s, rates.disk_write_bytes_per_s) == (4096, 2000, 300)


def test_what_the_system_does_not_count_is_none():
    before = Counters(0.0, (CoreTimes(0.0, 0.0, None),), None, None, None)
    after = Counters(1.0, (CoreTimes(0.5, 1.0, None),), None, 100, 100)
    rates = rates_between(before, after)
    assert rates.cpu_pct == 50.0
    assert rates.iowait_pct is rates.swap_in_bytes_per_s is rates.disk_read_bytes_per_s is None


def test_a_counter_that_fell_gives_no_rate():
    rates = rates_between(counters(0.0, read=500), counters(1.0, read=100))
    assert rates.disk_read_bytes_per_s is None
    assert rates.cpu_pct is None, "no core was read"


def test_a_core_that_was_taken_out_does_not_raise():
    rates = rates_between(counters(0.0, (0, 0, 0), (0, 0, 0)), counters(1.0, (1, 1, 0)))
    assert rates.cpu_per_core_pct == (100.0,)


def test_real_counters_only_grow():
    before, after = read_counters(0.0), read_counters(1.0)
    assert len(before.cores) == psutil.cpu_count()
    assert all(b.total_s <= a.total_s for b, a in zip(before.cores, after.cores, strict=True))


def test_a_reading_has_the_machines_figures():
    probe = HostProbe()
    start_s, cpu_s = time.monotonic(), time.process_time()
    while time.process_time() < cpu_s + 0.3:
        pass
    share = (time.process_time() - cpu_s) / (time.monotonic() - start_s)
    reading = probe.read()
    assert 0 < reading.cpu_pct <= 100
    assert len(reading.cpu_per_core_pct) == psutil.cpu_count()
    assert reading.tree_cpu_pct == pytest.approx(100 * share, rel=0.2)
    assert 0 < reading.mem_used_bytes < reading.mem_total_bytes
    while reading.tree_pss_bytes is None:  # a child of an earlier test was just ending; the test's own limit ends this
        time.sleep(0.05)
        reading = probe.read()
    assert reading.tree_pss_bytes > 10 * 1024**2
    assert reading.disk_read_bytes_per_s is None or reading.disk_read_bytes_per_s >= 0


def test_the_first_reading_at_once_has_no_rates_yet():
    clock = FakeClock()
    reading = HostProbe(clock=clock).read()
    assert reading.cpu_pct is reading.tree_cpu_pct is reading.disk_read_bytes_per_s is None
    assert reading.mem_total_bytes > 0


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_within_a_limit_use_is_that_of_the_group(tmp_path, version):
    root = write_cgroups(tmp_path, version, {"/": GroupLimits(memory_bytes=GIB, used_bytes=GIB // 2, cache_bytes=100)})
    reading = HostProbe(root=root).read()
    assert (reading.mem_limit_bytes, reading.mem_used_bytes) == (GIB, GIB // 2 - 100)
    assert reading.shm_total_bytes is None, "this machine has no /dev/shm"


def test_shared_memory_is_measured(tmp_path):
    (tmp_path / "dev/shm").mkdir(parents=True)
    total, free = shared_memory_bytes(tmp_path)
    assert total >= free > 0


def test_a_system_without_load_still_answers(monkeypatch):
    monkeypatch.delattr(os, "getloadavg", raising=False)
    assert HostProbe().read().load_1min is None


# --------------------------------------------------------------------------- the process tree


def test_a_tree_has_grandchildren_and_not_strangers():
    inner = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    child = subprocess.Popen([sys.executable, "-c", inner], stdin=subprocess.PIPE)
    try:
        tree, deadline = frozenset(), time.monotonic() + 20
        while len(tree) < 2 and time.monotonic() < deadline:
            tree = ProcessTree(child.pid).pids()
        assert child.pid in tree
        assert len(tree) == 2
        assert os.getpid() not in tree
    finally:
        child.communicate(b"\n", timeout=20)


def test_a_root_that_has_gone_is_no_tree():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    tree = ProcessTree(child.pid)
    assert tree.pids() == frozenset()
    assert tree.cpu_pct() is tree.pss_bytes() is None
    reading = HostProbe(child.pid).read()
    assert reading.tree_pss_bytes is reading.tree_cpu_pct is None


def pss_of(tree):
    """The tree is measured bit by bit, as the ration allows."""
    deadline = time.monotonic() + 60
    while (size := tree.pss_bytes()) is None:
        assert time.monotonic() < deadline
    return size


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PSS is told by Linux")
def test_memory_that_forked_workers_share_is_counted_once():
    # A process of its own: this one has children of other tests, and its forks would copy what they touch.
    forks = """
import os, sys
block = bytearray(os.urandom(1024)) * (200 * 1024)  # 200 MiB, every page written
print("alone", flush=True)
sys.stdin.readline()
any(os.fork() == 0 for _ in range(4))
os.write(1, b"forked\\n")  # at once: all five write
sys.stdin.readline()
"""
    with subprocess.Popen([sys.executable, "-c", forks], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout.readline() == b"alone\n"
        alone = pss_of(ProcessTree(parent.pid))
        parent.stdin.write(b"\n")
        parent.stdin.flush()
        for _ in range(5):
            assert parent.stdout.readline() == b"forked\n"
        tree = ProcessTree(parent.pid)
        together = pss_of(tree)
        resident = sum(psutil.Process(pid).memory_info().rss for pid in tree.pids())
        parent.stdin.close()
    assert 200 * 1024**2 < alone < 300 * 1024**2
    assert together < alone + 50 * 1024**2
    assert resident > 4 * 200 * 1024**2, "adding up resident sets would count the block five times"


def test_memory_falls_back_where_pss_is_not_told(monkeypatch):
    def unreadable(*args, **kwargs):
        raise OSError

    # A process of its own: this one may have children that other tests left running.
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as alone:
        time.sleep(0.5)
        monkeypatch.setattr("fulltilt.probes.host.open", unreadable, raising=False)
        size = ProcessTree(alone.pid).pss_bytes()
        monkeypatch.undo()
        assert size == pytest.approx(psutil.Process(alone.pid).memory_info().rss, rel=0.2)
        alone.kill()


def test_with_many_processes_memory_is_measured_in_turns(monkeypatch):
    measured = []

    def slow(pid):
        measured.append(pid)
        time.sleep(0.02)
        return 100

    monkeypatch.setattr("fulltilt.probes.host.proportional_bytes", slow)
    tree = ProcessTree(1)
    members = dict.fromkeys(range(8))
    monkeypatch.setattr(tree, "_walk", lambda: members)
    assert tree.pss_bytes() is None, "not all have been measured"
    assert 1 <= len(measured) <= 3, "one call measures for 50 ms"
    for _ in range(7):
        size = tree.pss_bytes()
    assert size == 800
    assert sorted(measured[:8]) == list(range(8)), "none is measured twice before each was measured once"
    for _ in range(50):
        tree.pss_bytes()
    assert len(measured) <= 9, "measuring again is rationed"
    del members[3]
    assert tree.pss_bytes() == 700


def test_the_stalest_process_is_measured_again_first(monkeypatch):
    measured = []
    monkeypatch.setattr("fulltilt.probes.host.proportional_bytes", lambda pid: measured.append(pid) or 1)
    tree = ProcessTree(1)
    monkeypatch.setattr(tree, "_walk", lambda: {pid: pid for pid in range(3)})
    monkeypatch.setattr(tree._next_pss, "due", lambda: True)
    tree.pss_bytes()
    tree.pss_bytes()
    assert measured == [0, 1, 2, 0, 1, 2]


def test_new_processes_are_seen_soon_where_walking_has_to_wait_for_a_cpu(monkeypatch):
    children = []

    def crowded(process, recursive):
        time.sleep(0.05)
        return list(children)

    monkeypatch.setattr(psutil.Process, "children", crowded)
    tree = ProcessTree(os.getpid())
    assert tree.pids() == {os.getpid()}
    children.append(psutil.Process(os.getppid()))
    assert os.getppid() in tree.pids()
