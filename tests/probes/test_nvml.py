import pynvml
import pytest

from fulltilt.probes.nvml import Gpm, GpuLost, Nvml
from fulltilt.testing import FakeClock, FakeNvml, h200, one_h200, t4


def opened(fake):
    nvml = Nvml(fake)
    assert nvml.start() is None
    return Gpm.open(nvml, fake.gpus[0], clock=fake.clock)


def test_a_gpu_before_hopper_has_none():
    assert opened(FakeNvml([t4()])) is None


def test_a_driver_without_gpm_has_none():
    assert opened(FakeNvml([h200()], unknown=["nvmlGpmQueryDeviceSupport"])) is None


def test_figures_follow_the_load():
    clock = FakeClock()
    gpm = opened(one_h200(clock, busy_after_s=5))
    clock.advance(1)
    idle = gpm.read()
    assert (idle.get("sm_active_pct"), idle.get("tensor_active_pct")) == (0.0, 0.0)
    clock.advance(4)
    gpm.read()
    clock.advance(1)
    busy = gpm.read()
    assert busy.get("sm_active_pct") == pytest.approx(96.0)
    assert busy.get("sm_occupancy_pct") == pytest.approx(40.0)
    assert busy.get("tensor_active_pct") == pytest.approx(88.0)
    assert busy.get("dram_active_pct") == pytest.approx(35.0)


def test_each_reading_covers_the_time_since_the_one_before():
    clock = FakeClock()
    gpm = opened(FakeNvml([h200(sm_active_pct=lambda t_s: 100.0 if 1 <= t_s < 2 else 0.0)], clock))
    means = []
    for _ in range(3):
        clock.advance(1)
        means.append(gpm.read()["sm_active_pct"])
    assert means == pytest.approx([0.0, 100.0, 0.0])


def test_readings_too_close_together_repeat_the_last_instead_of_reading_noise():
    clock = FakeClock()
    fake = FakeNvml([h200(sm_active_pct=lambda t_s: 100.0 * t_s)], clock)
    gpm = opened(fake)
    clock.advance(0.05)
    assert gpm.read() == {}, "nothing is known yet"
    clock.advance(0.05)
    first = gpm.read()
    assert first.get("sm_active_pct") == pytest.approx(5.0)
    clock.advance(0.05)
    assert gpm.read() == first
    assert fake.calls["nvmlGpmMetricsGet"] == 1


def test_a_metric_that_the_gpu_lacks_is_none_beside_the_others():
    clock = FakeClock()
    gpm = opened(FakeNvml([h200(gpm={pynvml.NVML_GPM_METRIC_SM_UTIL: 70.0})], clock))
    clock.advance(1)
    reading = gpm.read()
    assert (reading.get("sm_active_pct"), reading.get("dram_active_pct")) == (pytest.approx(70.0), None)


def test_a_failed_sample_begins_anew():
    clock = FakeClock()
    fake = FakeNvml([h200(sm_active_pct=lambda t_s: 10.0 * int(t_s))], clock)
    gpm = opened(fake)
    clock.advance(1)
    gpu = fake.gpus[0]
    gpu.split = True  # somebody turns MIG on: the whole GPU can no longer be sampled
    assert gpm.read() == {}
    gpu.split = False
    clock.advance(1)
    assert gpm.read() == {}, "the first sample after the gap"
    clock.advance(1)
    assert gpm.read()["sm_active_pct"] == pytest.approx(20.0)


def test_a_lost_gpu_is_raised():
    clock = FakeClock()
    gpm = opened(FakeNvml([h200(lost_after_s=1)], clock))
    clock.advance(1)
    with pytest.raises(GpuLost):
        gpm.read()


def test_closing_frees_both_buffers():
    fake = one_h200()
    gpm = opened(fake)
    assert len(fake.samples) == 2
    gpm.close()
    assert fake.samples == {}
