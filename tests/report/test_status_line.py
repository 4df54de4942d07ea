"""The status line is the guide's, to the letter."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulltilt.records import GpuReading, HostReading, Sample
from fulltilt.report.status_line import GIB, memory_line, status_line

HOST = HostReading(cpu_pct=45.2, mem_used_bytes=int(18.43 * GIB), mem_total_bytes=64 * GIB)


def a_gpu(util_pct: float | None = 85.0, used: float | None = 12.3, total: float | None = 24.0) -> GpuReading:
    return GpuReading(
        uuid="GPU-1",
        index=0,
        name="RTX 5090",
        util_pct=util_pct,
        vram_used_bytes=None if used is None else round(used * GIB),
        vram_total_bytes=None if total is None else round(total * GIB),
    )


def test_it_is_the_line_of_the_guide_to_the_letter() -> None:
    line = "GPU: 85% | VRAM:12.3/24.0GB(51.2%) | CPU: 45.2% | RAM:18.4/64.0GB(28.8%)"
    assert status_line(Sample(0.0, HOST, (a_gpu(),))) == line


def test_ram_is_what_the_container_may_use() -> None:
    host = HostReading(mem_used_bytes=8 * GIB, mem_total_bytes=64 * GIB, mem_limit_bytes=16 * GIB)
    assert status_line(Sample(0.0, host)).endswith("RAM:8.0/16.0GB(50.0%)")


def test_the_memory_line_is_the_guides_to_the_letter() -> None:
    assert memory_line(int(4.5 * GIB), int(5.2 * GIB)) == "GPU Memory - Allocated: 4.50 GB, Peak: 5.20 GB"


def test_each_gpu_has_its_line() -> None:
    sample = Sample(0.0, HOST, (a_gpu(), a_gpu(util_pct=3.0, used=0.5)))
    assert status_line(sample, 1).startswith("GPU: 3% | VRAM:0.5/24.0GB(2.1%) | ")


@pytest.mark.parametrize(
    ("sample", "line"),
    [
        (Sample(0.0, HOST), "GPU: n/a | VRAM:n/a | CPU: 45.2% | RAM:18.4/64.0GB(28.8%)"),
        (Sample(0.0, HostReading()), "GPU: n/a | VRAM:n/a | CPU: n/a | RAM:n/a"),
        (Sample(0.0, HostReading(), (a_gpu(None, None),)), "GPU: n/a | VRAM:n/a | CPU: n/a | RAM:n/a"),
        (
            Sample(0.0, HostReading(cpu_pct=0.0), (a_gpu(0.0, 0.0),)),
            "GPU: 0% | VRAM:0.0/24.0GB(0.0%) | CPU: 0.0% | RAM:n/a",
        ),
        (Sample(0.0, HOST, (a_gpu(100.0, total=0.0),)), "GPU: 100% | VRAM:n/a | CPU: 45.2% | RAM:18.4/64.0GB(28.8%)"),
    ],
)
def test_what_was_not_measured_is_not_a_zero(sample: Sample, line: str) -> None:
    assert status_line(sample) == line


@given(
    util_pct=st.floats(0, 100),
    cpu_pct=st.floats(0, 100),
    used=st.integers(0, 1 << 40),
    total=st.integers(1, 1 << 40),
)
def test_its_shape_never_changes(util_pct: float, cpu_pct: float, used: int, total: int) -> None:
    gpu = GpuReading("GPU-1", 0, "T4", util_pct=util_pct, vram_used_bytes=used, vram_total_bytes=total)
    host = HostReading(cpu_pct=cpu_pct, mem_used_bytes=used, mem_total_bytes=total)
    memory = r"\d+\.\d/\d+\.\dGB\(\d+\.\d%\)"
    shape = rf"GPU: \d{{1,3}}% \| VRAM:{memory} \| CPU: \d+\.\d% \| RAM:{memory}"
    assert re.fullmatch(shape, status_line(Sample(0.0, host, (gpu,))))
