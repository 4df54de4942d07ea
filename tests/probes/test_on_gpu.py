"""The probes on a real NVIDIA GPU: figures that follow a real load."""

import os
import subprocess
import sys
import time

import pytest

from fulltilt.probes.gpu import Gpus
from fulltilt.probes.sampler import Sampler

pytestmark = pytest.mark.gpu

MULTIPLY = """
import time, torch
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
print("ready", flush=True)
end = time.monotonic() + {seconds}
while time.monotonic() < end:
    for _ in range(50):
        a @ a
    torch.cuda.synchronize()
"""


@pytest.fixture
def multiplying():
    """A process of ours that keeps the first GPU busy with matrix products."""
    process = subprocess.Popen([sys.executable, "-c", MULTIPLY.format(seconds=30)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    time.sleep(1.0)  # for clocks and averages to settle
    yield process
    process.kill()
    process.wait()


def test_an_idle_gpu_reads_near_zero():
    with Gpus.open() as gpus:
        assert gpus.why_none is None
        time.sleep(1.0)
        reading = gpus.read()[0]
    print(reading)
    assert reading.uuid.startswith("GPU-")
    assert not reading.lost
    assert reading.vram_total_bytes > reading.vram_used_bytes
    assert reading.util_pct < 10
    assert reading.sm_active_pct is None or reading.sm_active_pct < 5


def test_a_busy_gpu_reads_near_its_limits(multiplying):
    with Gpus.open() as gpus:
        time.sleep(1.0)
        reading = gpus.read()[0]
    print(reading)
    assert reading.util_pct > 90
    assert reading.vram_used_bytes > 128 * 1024**2
    assert reading.temperature_c < (reading.temperature_limit_c or 200)
    if reading.sm_active_pct is not None:
        assert reading.sm_active_pct > 90
        assert reading.tensor_active_pct > 50
        assert 0 < reading.sm_occupancy_pct <= 100
        assert 0 < reading.dram_active_pct <= 100
    assert all(process.ours for process in reading.processes or ())


def test_visible_devices_agree_with_torch():
    code = "import torch; print(torch.cuda.device_count(), torch.cuda.get_device_properties(0).uuid)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, uuid = done.stdout.split()
    with Gpus.open() as gpus:
        readings = gpus.read()
    assert len(readings) == int(count)
    assert readings[0].uuid == f"GPU-{uuid}"


def test_sampling_costs_under_one_percent_of_a_core(multiplying):
    samples = []
    with Gpus.open() as gpus:
        sampler = Sampler(samples.append, gpus=gpus)
        start_s, cpu_s = time.monotonic(), time.process_time()
        with sampler:
            time.sleep(10.0)
        share = (time.process_time() - cpu_s) / (time.monotonic() - start_s)
    print(f"{100 * share:.2f} % of one core, {os.cpu_count()} CPUs")
    assert all(sample.host.mem_total_bytes and sample.gpus for sample in samples)
    assert 10 <= len(samples) <= 13
    assert share < 0.01
