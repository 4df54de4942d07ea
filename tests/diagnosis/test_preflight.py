"""The preflight says what would go wrong, with its figure and a remedy, and nothing else."""

import dataclasses
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fulltilt.diagnosis.preflight import LoaderPlan, preflight
from fulltilt.records import (
    CheckLine,
    CpuCapacity,
    GpuProcess,
    GpuReading,
    HostReading,
    Machine,
    Sample,
    StorageReading,
)
from tests.anything import any_physical

MIB, GIB = 1024**2, 1024**3

T4 = GpuReading(
    uuid="GPU-1",
    index=0,
    name="Tesla T4",
    vram_used_bytes=300 * MIB,
    vram_total_bytes=15 * GIB,
    temperature_c=45.0,
    temperature_limit_c=93.0,
    sm_clock_mhz=1590.0,
    sm_clock_max_mhz=1590.0,
    throttle_reasons=(),
    processes=(),
)
MACHINE = Machine(
    hostname="box",
    platform="Linux",
    python="3.12.3",
    torch="2.15.0",
    cuda="12.8",
    driver="570.86",
    cpu=CpuCapacity(present=16, affinity=16, quota=None, usable=16.0),
    mem_total_bytes=64 * GIB,
    mem_limit_bytes=None,
    shm_total_bytes=32 * GIB,
    shm_free_bytes=32 * GIB,
    gpus=(T4,),
    driver_cuda="12.8",
)
FAST = StorageReading(
    path="/data/cod",
    filesystem="ext4",
    kind="nvme",
    files=10_000,
    total_bytes=2 * GIB,
    counted_fully=True,
    sequential_cold_bytes_per_s=1.8e9,
    sequential_warm_bytes_per_s=6e9,
    small_cold_files_per_s=4000.0,
    small_warm_files_per_s=30_000.0,
    fits_in_ram=True,
)
SLOW = dataclasses.replace(FAST, kind="hdd", sequential_cold_bytes_per_s=90e6, small_cold_files_per_s=80.0)


def sample(used_gib: float = 8.0, *gpus: GpuReading) -> Sample:
    return Sample(0.0, HostReading(mem_used_bytes=int(used_gib * GIB)), gpus)


def line(name: str, **changes: Any) -> CheckLine:
    """The line of that name on a good machine with some changes."""
    given_ = {"storage": FAST, "sample": sample(), "plan": None}
    given_ |= {key: changes.pop(key) for key in list(changes) if key in given_}
    found = {line.name: line for line in preflight(dataclasses.replace(MACHINE, **changes), **given_)}
    return found[name]


def gpu(**changes: Any) -> tuple[GpuReading, ...]:
    return (dataclasses.replace(T4, **changes),)


def cpu(present: int, affinity: int, quota: float | None) -> CpuCapacity:
    return CpuCapacity(present, affinity, quota, min(affinity, quota or affinity))


def test_a_good_machine_passes_every_line() -> None:
    lines = preflight(MACHINE, FAST, sample(), LoaderPlan(8, 4, 100 * MIB))
    assert [(line.name, line.state) for line in lines] == [
        (name, "ok")
        for name in (
            "GPU",
            "CUDA",
            "VRAM",
            "sharing",
            "throttling",
            "temperature",
            "CPUs",
            "memory",
            "/dev/shm",
            "data",
            "RAM disk",
        )
    ]
    assert all(line.remedy is None for line in lines)


@pytest.mark.parametrize(
    ("name", "changes", "state", "figure"),
    [
        ("GPU", {"gpus": (), "why_no_gpu": "no NVIDIA driver was found"}, "warn", "none: no NVIDIA driver was found"),
        ("GPU", {"gpus": gpu(lost=True)}, "fail", "GPU 0 (Tesla T4) no longer answers"),
        ("GPU", {"gpus": (*gpu(), *gpu(index=1))}, "ok", "2 × Tesla T4"),
        ("CUDA", {"torch": None, "cuda": None}, "fail", "torch is not installed"),
        ("CUDA", {"cuda": None}, "fail", "torch 2.15.0 is built without CUDA"),
        ("CUDA", {"cuda": None, "gpus": ()}, "ok", "torch 2.15.0 is built without CUDA; there is no GPU to use it"),
        ("CUDA", {"cuda": "13.0"}, "fail", "torch is built for CUDA 13.0, the driver runs up to 12.8"),
        ("CUDA", {"cuda": "12.10"}, "ok", "torch is built for CUDA 12.10, the driver runs up to 12.8"),
        ("CUDA", {"cuda": "11.8"}, "ok", "torch is built for CUDA 11.8, the driver runs up to 12.8"),
        ("CUDA", {"driver_cuda": None, "gpus": ()}, "skip", "torch is built for CUDA 12.8; there is no driver"),
        ("VRAM", {"gpus": gpu(vram_used_bytes=12 * GIB)}, "warn", "GPU 0: 3 of 15 GiB free"),
        ("VRAM", {"gpus": gpu(vram_used_bytes=None)}, "skip", "this GPU"),
        ("VRAM", {"gpus": (*gpu(), *gpu(vram_used_bytes=0, index=1))}, "ok", "GPU 0: 14.7 of 15 GiB free"),
        (
            "sharing",
            {"gpus": gpu(processes=(GpuProcess(77, "python", 2 * GIB, False),))},
            "warn",
            "GPU 0: python (pid 77) holds 2 GiB",
        ),
        ("sharing", {"gpus": gpu(processes=(GpuProcess(77, None, None, False),))}, "warn", "GPU 0: a process (pid 77)"),
        ("sharing", {"gpus": gpu(processes=(GpuProcess(7, "Xorg", 9 * MIB, False),))}, "ok", "no other process"),
        ("sharing", {"gpus": gpu(processes=(GpuProcess(77, "python", GIB, True),))}, "ok", "no other process"),
        ("sharing", {"gpus": gpu(processes=None)}, "skip", "the driver does not report"),
        (
            "sharing",
            {"gpus": gpu(processes=tuple(GpuProcess(n, "p", GIB, False) for n in range(5)))},
            "warn",
            "GPU 0: p (pid 0) holds 1 GiB; GPU 0: p (pid 1) holds 1 GiB; GPU 0: p (pid 2) holds 1 GiB; 2 more",
        ),
        (
            "throttling",
            {"gpus": gpu(throttle_reasons=("hw_thermal",), sm_clock_mhz=600.0)},
            "warn",
            "GPU 0: hw thermal (600 of 1590 MHz)",
        ),
        ("throttling", {"gpus": gpu(throttle_reasons=("power_cap",), sm_clock_mhz=1500.0)}, "ok", "none"),
        ("throttling", {"gpus": gpu(throttle_reasons=("power_cap",), sm_clock_mhz=900.0)}, "warn", "GPU 0: power cap"),
        ("throttling", {"gpus": gpu(throttle_reasons=("board_limit",), sm_clock_mhz=1500.0)}, "ok", "none"),
        ("throttling", {"gpus": gpu(throttle_reasons=None)}, "skip", "the driver does not report"),
        ("temperature", {"gpus": gpu(temperature_c=89.0)}, "warn", "GPU 0: 89 °C, slows down at 93 °C"),
        ("temperature", {"gpus": gpu(temperature_c=93.0)}, "fail", "GPU 0: 93 °C, slows down at 93 °C"),
        ("temperature", {"gpus": gpu(temperature_c=88.0)}, "ok", "GPU 0: 88 °C, slows down at 93 °C"),
        ("temperature", {"gpus": gpu(temperature_limit_c=None)}, "skip", "the driver does not report"),
        ("CPUs", {"cpu": cpu(16, 16, 0.5)}, "warn", "0.5 of 16 usable (the cgroup's quota is 0.5)"),
        ("CPUs", {"cpu": cpu(16, 4, None)}, "warn", "4 of 16 usable (affinity: 4)"),
        ("CPUs", {"cpu": cpu(16, 16, 32.0)}, "ok", "16 of 16 usable"),
        ("CPUs", {"plan": LoaderPlan(workers=24)}, "warn", "16 of 16 usable, 24 workers asked for"),
        ("CPUs", {"plan": LoaderPlan(workers=16)}, "ok", "16 of 16 usable"),
        ("memory", {"sample": sample(56)}, "warn", "56 of 64 GiB used"),
        ("memory", {"sample": sample(62)}, "fail", "62 of 64 GiB used"),
        (
            "memory",
            {"sample": sample(7), "mem_limit_bytes": 8 * GIB},
            "warn",
            "7 of 8 GiB (the cgroup's limit) used",
        ),
        ("memory", {"plan": LoaderPlan(workers=8)}, "ok", "8 of 64 GiB used, 7 GiB left for each of 8 workers"),
        ("memory", {"sample": None}, "ok", "64 GiB"),
        ("memory", {"mem_total_bytes": None}, "skip", "not measured"),
        (
            "/dev/shm",
            {"shm_free_bytes": 64 * MIB, "plan": LoaderPlan(4, 2, 16 * MIB)},
            "fail",
            "64 MiB free, 128 MiB needed: 4 workers × 2 × 16 MiB",
        ),
        (
            "/dev/shm",
            {"shm_free_bytes": 64 * MIB},
            "warn",
            "64 MiB free, 1.1 GiB needed: 16 workers × 2 × 36.8 MiB (workers, prefetch, batch assumed)",
        ),
        ("/dev/shm", {"shm_free_bytes": 140 * MIB, "plan": LoaderPlan(4, 2, 16 * MIB)}, "warn", "140 MiB free"),
        ("/dev/shm", {"shm_free_bytes": 160 * MIB, "plan": LoaderPlan(4, 2, 16 * MIB)}, "ok", "160 MiB free"),
        (
            "/dev/shm",
            {"shm_free_bytes": 64 * MIB, "plan": LoaderPlan(0, 2, 16 * MIB)},
            "ok",
            "64 MiB free, 0 B needed: 0 workers",
        ),
        ("/dev/shm", {"shm_free_bytes": None}, "skip", "there is none"),
        (
            "/dev/shm",
            {"mem_limit_bytes": GIB, "plan": LoaderPlan(8, 4, 100 * MIB)},
            "fail",
            "1 GiB allowed, 3.1 GiB needed: 8 workers × 4 × 100 MiB",
        ),
        ("data", {"storage": None}, "skip", "not checked"),
        ("data", {"storage": SLOW}, "warn", "on a hard disk, 85.8 MiB/s and 80 files/s uncached"),
        ("data", {"storage": FAST}, "ok", "on NVMe, 1.7 GiB/s and 4,000 files/s uncached"),
        ("data", {"storage": StorageReading("/mnt", kind="network", files=9)}, "warn", "on a network file system"),
        (
            "data",
            {"storage": StorageReading("/mnt", kind="overlay", files=9)},
            "skip",
            "on a container's overlay; what it reads",
        ),
        ("data", {"storage": StorageReading("/mnt", files=0)}, "warn", "there is no file in /mnt"),
        ("data", {"storage": StorageReading("/dev/shm/x", kind="tmpfs", files=9)}, "ok", "in RAM"),
        ("RAM disk", {"storage": SLOW}, "warn", "would help, and the data (2 GiB) fits"),
        ("RAM disk", {"storage": dataclasses.replace(SLOW, kind="tmpfs")}, "ok", "the data is on one"),
        (
            "RAM disk",
            {"storage": dataclasses.replace(SLOW, fits_in_ram=False)},
            "warn",
            "the data (2 GiB) does not",
        ),
        ("RAM disk", {"storage": dataclasses.replace(FAST, fits_in_ram=False)}, "ok", "the data (2 GiB) does not"),
        (
            "RAM disk",
            {"storage": dataclasses.replace(FAST, counted_fully=False)},
            "ok",
            "not needed: the data (at least",
        ),
        ("RAM disk", {"storage": StorageReading("/mnt", files=9)}, "skip", "the size of the data is not known"),
    ],
)
def test_each_trouble_is_told_with_its_figure(name: str, changes: dict[str, Any], state: str, figure: str) -> None:
    found = line(name, **changes)
    assert (found.state, found.figure[: len(figure)]) == (state, figure)
    assert (found.remedy is not None) == (found.state in ("warn", "fail") or found.figure == "not checked")


@pytest.mark.parametrize(
    ("name", "changes", "remedy"),
    [
        ("/dev/shm", {"shm_free_bytes": 64 * MIB, "plan": LoaderPlan(8, 4, 100 * MIB)}, "--shm-size=4g"),
        ("/dev/shm", {"mem_limit_bytes": GIB, "plan": LoaderPlan(8, 4, 100 * MIB)}, "docker run --memory=4g"),
        ("CPUs", {"cpu": cpu(16, 16, 0.5)}, "Plan for 1 CPU,"),
        ("CPUs", {"cpu": cpu(16, 16, 3.9), "plan": LoaderPlan(workers=12)}, "Start with 3 workers:"),
        ("CUDA", {"cuda": "13.0"}, "a torch built for CUDA 12."),
        ("RAM disk", {"storage": dataclasses.replace(SLOW, path="/my data")}, "cp -r '/my data' /dev/shm/"),
        ("RAM disk", {"storage": SLOW, "shm_free_bytes": GIB}, "Mount a tmpfs"),
        ("throttling", {"gpus": gpu(throttle_reasons=("power_brake",))}, "The power supply"),
    ],
)
def test_remedies_fit_the_case(name: str, changes: dict[str, Any], remedy: str) -> None:
    assert remedy in str(line(name, **changes).remedy)


def test_a_live_sample_outweighs_the_reading_taken_when_the_machine_was_described() -> None:
    hot = sample(8.0, dataclasses.replace(T4, temperature_c=92.0))
    assert line("temperature", sample=hot).state == "warn"


def test_without_a_gpu_the_gpu_lines_are_left_out() -> None:
    names = [line.name for line in preflight(dataclasses.replace(MACHINE, gpus=()))]
    assert names == ["GPU", "CUDA", "CPUs", "memory", "/dev/shm", "data"]


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(machine=any_physical(Machine), storage=any_physical(StorageReading | None), sample=any_physical(Sample | None))
def test_no_machine_breaks_it(machine: Machine, storage: StorageReading | None, sample: Sample | None) -> None:
    lines = preflight(machine, storage, sample)
    assert len({line.name for line in lines}) == len(lines)
    assert all(line.figure for line in lines)


@given(st.integers(0, 2**50))
def test_more_need_never_reads_as_better(free: int) -> None:
    order = ("ok", "warn", "fail")
    states = [line("/dev/shm", shm_free_bytes=free, plan=LoaderPlan(n, 2, 100 * MIB)).state for n in (1, 4, 16, 64)]
    assert [order.index(state) for state in states] == sorted(order.index(state) for state in states)
