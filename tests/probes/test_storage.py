import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fulltilt.errors import MachineError, UsageError
from fulltilt.probes import storage
from fulltilt.probes.cgroup import Mount, mount_of, read_mounts
from fulltilt.probes.storage import count_files, read_storage, storage_kind

MIB = 1024**2
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the page cache can be dropped on Linux")


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    (folder / "images").mkdir(parents=True)
    for number in range(100):
        (folder / "images" / f"{number}.jpg").write_bytes(os.urandom(20_000))
    for number in range(3):
        (folder / f"shard-{number}.tar").write_bytes(os.urandom(MIB) * 4)
    if sys.platform.startswith("linux"):
        subprocess.run(["sync", "-f", str(folder)], check=True)  # dirty pages cannot be dropped
    return folder


def test_a_folder_is_measured(data):
    reading = read_storage(data)
    assert (reading.path, reading.files, reading.counted_fully) == (str(data), 103, True)
    assert reading.total_bytes == 100 * 20_000 + 12 * MIB
    assert reading.sequential_warm_bytes_per_s > 50 * MIB
    assert reading.small_warm_files_per_s > 100
    assert reading.fits_in_ram is True
    assert reading.free_bytes > 0


@linux
def test_cold_is_colder_than_warm_or_not_claimed(data):
    reading = read_storage(data)
    if reading.kind == "tmpfs":
        pytest.skip("the temporary folder lies in memory")
    assert reading.filesystem
    assert reading.sequential_cold_bytes_per_s is not None
    assert reading.sequential_cold_bytes_per_s < reading.sequential_warm_bytes_per_s
    assert reading.small_cold_files_per_s < reading.small_warm_files_per_s


@linux
def test_the_kernel_confirms_that_dropped_files_are_cold(data):
    if read_storage(data).kind == "tmpfs":
        pytest.skip("the temporary folder lies in memory")
    file = next(file for file in count_files(data, time.perf_counter() + 9).large)
    with Path(file).open("rb") as stream:
        stream.read()
        os.fsync(stream.fileno())  # the kernel keeps what is not on disk yet
    buffer, deadline_s = bytearray(MIB), time.perf_counter() + 60
    assert storage._timed_read(file, buffer, deadline_s)[2] is False
    for _ in range(50):  # the kernel takes it as advice: pages that are in other hands at the moment stay
        storage._drop_from_cache(file)
        if storage._timed_read(file, buffer, deadline_s)[2]:
            return
    pytest.fail("no read was cold")


@linux
def test_memory_file_systems_have_no_cold_rate():
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        pytest.skip("there is no /dev/shm here")
    folder = shm / f"fulltilt-test-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / "a.bin").write_bytes(bytes(2 * MIB))
        (folder / "b.bin").write_bytes(bytes(1000))
        reading = read_storage(folder)
    finally:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    assert (reading.kind, reading.fits_in_ram) == ("tmpfs", True)
    assert reading.sequential_cold_bytes_per_s is reading.small_cold_files_per_s is None
    assert reading.sequential_warm_bytes_per_s > 0
    assert reading.small_warm_files_per_s > 0


@pytest.mark.parametrize(("slower", "claimed"), [(1.0, False), (2.0, False), (10.0, True)])
def test_a_cold_rate_that_is_not_proven_is_claimed_only_if_it_is_much_slower(data, monkeypatch, slower, claimed):
    reads = set()

    def timed(file, buffer, deadline_s):
        size_bytes, first = Path(file).stat().st_size, file not in reads
        reads.add(file)
        return size_bytes, size_bytes * 1e-9 * (slower if first else 1.0), None

    monkeypatch.setattr(storage, "_timed_read", timed)
    reading = read_storage(data)
    assert reading.sequential_warm_bytes_per_s == pytest.approx(1e9)
    assert (reading.sequential_cold_bytes_per_s is not None) == claimed
    assert (reading.small_cold_files_per_s is not None) == claimed


def test_an_empty_folder_has_no_rates(tmp_path):
    reading = read_storage(tmp_path)
    assert (reading.files, reading.total_bytes, reading.counted_fully) == (0, 0, True)
    assert reading.sequential_warm_bytes_per_s is reading.small_warm_files_per_s is None


def test_nothing_in_the_folder_changes(data):
    def state():
        return sorted((str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in data.rglob("*"))

    before = state()
    read_storage(data)
    assert state() == before


# --------------------------------------------------------------------------- budgets


@pytest.mark.quiet
def test_a_large_folder_ends_in_time(tmp_path):
    for number in range(20_000):
        (tmp_path / str(number)).touch()
    start_s = time.perf_counter()
    reading = read_storage(tmp_path, budget_s=0.05)
    assert time.perf_counter() - start_s < 1.0
    assert not reading.counted_fully
    assert 0 < reading.files < 20_000
    assert reading.fits_in_ram is None


def test_no_more_bytes_are_read_than_allowed(data, monkeypatch):
    total = 0
    real = storage._timed_read

    def counting(file, buffer, deadline_s):
        nonlocal total
        size, *rest = real(file, buffer, deadline_s)
        total += size
        return size, *rest

    monkeypatch.setattr(storage, "_timed_read", counting)
    read_storage(data, budget_bytes=2 * MIB)
    # A pass ends after the file with which it reaches its share: one shard twice, and half a megabyte of images.
    assert 0 < total <= 2 * 4 * MIB + MIB


def test_a_file_that_vanishes_is_passed_over(data, monkeypatch):
    real = storage.count_files

    def then_delete(folder, deadline_s):
        census = real(folder, deadline_s)
        Path(census.small[0]).unlink()
        return census

    monkeypatch.setattr(storage, "count_files", then_delete)
    assert read_storage(data).small_warm_files_per_s > 0


# --------------------------------------------------------------------------- counting


def test_links_are_followed_once(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real/a").write_bytes(b"12345")
    (tmp_path / "real/back").symlink_to(tmp_path)
    (tmp_path / "again").symlink_to(tmp_path / "real")
    (tmp_path / "dead").symlink_to(tmp_path / "nothing")
    census = count_files(tmp_path, time.perf_counter() + 9)
    assert (census.files, census.total_bytes, census.fully) == (1, 5, True)


@pytest.mark.skipif(os.name != "posix", reason="pipes in folders are a Unix thing")
def test_a_pipe_is_not_a_file_to_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert read_storage(tmp_path).files == 0


def test_the_sample_is_drawn_from_all_files(tmp_path):
    for number in range(1500):
        (tmp_path / f"{number:05}").touch()
    census = count_files(tmp_path, time.perf_counter() + 60)
    names = {int(Path(file).name) for file in census.small}
    assert len(census.small) == len(names) == 1000
    assert sum(number >= 750 for number in names) in range(400, 601)


# --------------------------------------------------------------------------- mistakes


def test_a_folder_that_does_not_exist_is_one_clear_line(tmp_path):
    with pytest.raises(UsageError, match="does not exist") as caught:
        read_storage(tmp_path / "nothing")
    assert len(str(caught.value).splitlines()) == 1
    assert caught.value.exit_code == 2


def test_a_file_instead_of_a_folder_is_one_clear_line(tmp_path):
    (tmp_path / "a.zip").touch()
    with pytest.raises(UsageError, match="is a file"):
        read_storage(tmp_path / "a.zip")


def test_a_folder_that_may_not_be_read_is_the_machines_fault(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(MachineError, match="Permission denied"):
        read_storage(tmp_path)


# --------------------------------------------------------------------------- what it lies on

TABLE = """\
22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
30 22 0:25 / /dev/shm rw - tmpfs tmpfs rw
31 22 8:17 / /data rw - xfs /dev/sdb1 rw
32 31 0:50 / /data/with\\040space rw - nfs4 server:/export rw
33 22 8:1 / /twice rw - ext4 /dev/sda1 rw
34 22 0:60 / /twice rw master:5 - fuse.gcsfuse bucket rw
"""


def table(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(TABLE)
    return read_mounts(tmp_path)


@pytest.mark.parametrize(
    ("folder", "filesystem"),
    [
        ("/home/me", "ext4"),
        ("/data/set", "xfs"),
        ("/database", "ext4"),
        ("/data/with space/set", "nfs4"),
        ("/dev/shm/x", "tmpfs"),
        ("/twice", "fuse.gcsfuse"),
    ],
)
def test_the_deepest_and_last_mount_counts(tmp_path, folder, filesystem):
    assert mount_of(Path(folder), table(tmp_path)).filesystem == filesystem


def block(root, number, path, rotational, vendor=None, partition=False):
    disk = root / "sys/devices" / path
    (disk / "queue").mkdir(parents=True)
    (disk / "queue/rotational").write_text(f"{rotational}\n")
    if vendor:
        (disk / "device").mkdir()
        (disk / "device/vendor").write_text(f"{vendor}    \n")
    target = disk
    if partition:
        target = disk / f"{disk.name}1"
        target.mkdir()
        (target / "partition").write_text("1\n")
    (root / "sys/dev/block").mkdir(parents=True, exist_ok=True)
    (root / "sys/dev/block" / number).symlink_to(target)
    return disk


def mount(filesystem, number="8:1", source="/dev/sda1"):
    return Mount(number, "/", "/", filesystem, source, ("rw",))


@pytest.mark.parametrize(
    ("path", "rotational", "vendor", "kind"),
    [
        ("pci/nvme/nvme0n1", 0, None, "nvme"),
        ("pci/ata1/sda", 0, "ATA", "ssd"),
        ("pci/ata1/sda", 1, "ATA", "hdd"),
        ("pci/virtio/vda", 1, None, "unknown"),  # a virtual disk says so whatever it is
        ("pci/virtio/vda", 0, None, "ssd"),
        ("pci/scsi/sdc", 1, "Msft", "unknown"),
    ],
)
@pytest.mark.parametrize("partition", [True, False])
def test_the_kind_of_a_disk(tmp_path, path, rotational, vendor, kind, partition):
    block(tmp_path, "8:1", path, rotational, vendor, partition)
    assert storage_kind(mount("ext4"), tmp_path) == kind


def test_a_volume_is_as_slow_as_the_slowest_disk_below(tmp_path):
    fast, slow = block(tmp_path, "8:0", "a/sda", 0), block(tmp_path, "8:16", "b/sdb", 1)
    volume = block(tmp_path, "253:0", "virtual/dm-0", 0)
    (volume / "slaves").mkdir()
    (volume / "slaves/sda").symlink_to(fast)
    assert storage_kind(mount("ext4", "253:0"), tmp_path) == "ssd"
    (volume / "slaves/sdb").symlink_to(slow)
    assert storage_kind(mount("ext4", "253:0"), tmp_path) == "hdd"


@pytest.mark.parametrize(
    ("filesystem", "kind"),
    [
        ("tmpfs", "tmpfs"),
        ("overlay", "overlay"),
        ("fuse.fuse-overlayfs", "overlay"),
        ("nfs4", "network"),
        ("cifs", "network"),
        ("lustre", "network"),
        ("9p", "network"),
        ("fuse.gcsfuse", "network"),
        ("fuse.s3fs", "network"),
        ("btrfs", "unknown"),  # its device is not there
    ],
)
def test_the_kind_of_a_file_system(tmp_path, filesystem, kind):
    assert storage_kind(mount(filesystem, "0:44"), tmp_path) == kind
