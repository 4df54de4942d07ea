import os
import threading
import time

import pynvml
import pytest

from fulltilt.probes.gpu import Gpus, throttle_words
from fulltilt.probes.nvml import Nvml
from fulltilt.testing import (
    FakeClock,
    FakeNvml,
    h200,
    lost_gpu,
    no_driver,
    one_h200,
    shared_gpu,
    t4,
    throttled_gpu,
    two_t4s,
)

GIB = 1024**3


def opened(nvml, **options):
    return Gpus.open(nvml, **{"environ": {}, "clock": nvml.clock, **options})


# --------------------------------------------------------------------------- no GPU is an ordinary case


@pytest.mark.parametrize(
    ("nvml", "words"),
    [
        (no_driver(), "no NVIDIA driver is installed"),
        (FakeNvml(init_error=pynvml.NVML_ERROR_DRIVER_NOT_LOADED), "not loaded"),
        (FakeNvml(init_error=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH), "reboot"),
        (FakeNvml(init_error=pynvml.NVML_ERROR_NO_PERMISSION), "may not talk"),
        (FakeNvml(init_error=pynvml.NVML_ERROR_UNKNOWN), "Unknown Error"),
        (FakeNvml([]), "sees no GPU"),
        (object(), "NVML failed"),
    ],
)
def test_without_a_gpu_it_reads_nothing_and_says_why(nvml, words):
    with Gpus.open(nvml, environ={}) as gpus:
        assert words in gpus.why_none
        assert gpus.read() == ()
    assert gpus.read() == ()


def test_hidden_gpus_are_said_to_be_hidden():
    gpus = opened(two_t4s(), environ={"CUDA_VISIBLE_DEVICES": ""})
    assert gpus.read() == ()
    assert "CUDA_VISIBLE_DEVICES='' shows none of the 2 GPUs" in gpus.why_none
    assert gpus.driver == "570.86.15"


# --------------------------------------------------------------------------- readings


def test_two_t4s_are_read_with_their_units():
    gpus = opened(two_t4s())
    assert (gpus.driver, gpus.cuda, gpus.why_none) == ("570.86.15", "12.8", None)
    first, second = gpus.read()
    assert (first.index, first.name, first.util_pct, first.vram_used_bytes) == (0, "Tesla T4", 85.0, 9 * GIB)
    assert (first.power_w, first.power_limit_w, first.vram_total_bytes) == (62.0, 70.0, 15 * GIB)
    assert (first.temperature_c, first.temperature_limit_c) == (40.0, 93.0)
    assert (first.sm_clock_mhz, first.sm_clock_max_mhz, first.mem_clock_mhz) == (1000.0, 1590.0, 2000.0)
    assert first.throttle_reasons == ()
    assert first.processes == ()
    assert not first.lost
    assert (second.index, second.util_pct) == (1, 0.0)
    assert first.sm_active_pct is None, "a T4 has no GPM"


def test_energy_is_in_joules():
    clock = FakeClock()
    gpus = opened(FakeNvml([t4(power_w=50.0)], clock))
    clock.advance(10)
    assert gpus.read()[0].energy_j == pytest.approx(500.0)


def test_what_a_gpu_does_not_support_is_none_and_not_zero():
    gpu = t4(util_pct=None, power_w=None, power_limit_w=None, sm_clock_mhz=None, mem_clock_mhz=None, slowdown_c=None)
    (reading,) = opened(FakeNvml([gpu])).read()
    assert reading.util_pct is reading.mem_util_pct is reading.power_w is reading.energy_j is None
    assert reading.power_limit_w is reading.sm_clock_mhz is reading.temperature_limit_c is None
    assert not reading.lost


def test_an_old_driver_is_asked_by_the_old_names():
    unknown = ["nvmlDeviceGetTemperatureV", "nvmlDeviceGetCurrentClocksEventReasons"]
    gpu = t4(temperature_c=71, clock_events=0x40)
    (reading,) = opened(FakeNvml([gpu], unknown=unknown)).read()
    assert reading.temperature_c == 71.0
    assert reading.throttle_reasons == ("hw_thermal",)


def test_the_slowdown_temperature_comes_from_the_margin_where_there_is_no_threshold():
    (reading,) = opened(FakeNvml([h200(temperature_c=40, margin_c=47)])).read()
    assert reading.temperature_limit_c == 87.0


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (None, None),
        (0, ()),
        (0x1 | 0x2 | 0x100, ()),  # idle, user's clocks, display: nothing is wrong
        (0x4 | 0x1, ("power_cap",)),
        (0x8 | 0x40, ("hw_slowdown", "hw_thermal")),
        (0x10 | 0x20 | 0x80 | 0x200 | 0x400, ("sync_boost", "thermal", "power_brake", "board_limit", "reliability")),
    ],
)
def test_throttle_reasons_as_words(bits, words):
    assert throttle_words(bits) == words


def test_throttling_shows_when_it_begins():
    clock = FakeClock()
    gpus = opened(throttled_gpu(clock, after_s=10))
    assert gpus.read()[0].throttle_reasons == ()
    clock.advance(10)
    (reading,) = gpus.read()
    assert reading.throttle_reasons == ("thermal",)
    assert reading.sm_clock_mhz == 600.0
    assert reading.temperature_c > reading.temperature_limit_c


# --------------------------------------------------------------------------- which GPUs


def test_visible_devices_are_numbered_as_cuda_numbers_them():
    nvml = FakeNvml([t4(0), t4(1), t4(2)])
    readings = opened(nvml, environ={"CUDA_VISIBLE_DEVICES": f"2,{0}"}).read()
    assert [(reading.index, reading.uuid) for reading in readings] == [(0, t4(2).uuid), (1, t4(0).uuid)]


def test_a_monitor_sees_all_devices():
    gpus = opened(two_t4s(), environ={"CUDA_VISIBLE_DEVICES": "1"}, all_devices=True)
    assert [reading.index for reading in gpus.read()] == [0, 1]


def test_cuda_puts_the_fastest_first_unless_told_otherwise():
    nvml = FakeNvml([t4(0), h200()])
    fastest = opened(nvml, environ={"CUDA_VISIBLE_DEVICES": "0"}).read()
    by_bus = opened(nvml, environ={"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).read()
    assert [fastest[0].name, by_bus[0].name] == ["NVIDIA H200", "Tesla T4"]


def split_h200():
    migs = tuple(
        h200(
            sm_active_pct=10.0 * number,
            uuid=f"MIG-{number}{number}",
            name=f"NVIDIA H200 MIG 1g.18gb {number}",
            vram_total_bytes=18 * GIB,
            util_pct=None,
            power_w=None,
            gpu_instance=number,
        )
        for number in (3, 5)
    )
    return h200(split=True, migs=migs)


def test_a_mig_device_is_found_by_its_uuid_and_has_gpm_of_its_own():
    clock = FakeClock()
    gpus = opened(FakeNvml([split_h200()], clock), environ={"CUDA_VISIBLE_DEVICES": "MIG-55"})
    clock.advance(1)
    (reading,) = gpus.read()
    assert (reading.uuid, reading.index, reading.vram_total_bytes) == ("MIG-55", 0, 18 * GIB)
    assert reading.sm_active_pct == pytest.approx(50.0)
    assert reading.util_pct is None
    assert reading.temperature_c == 40.0, "the board's"


def test_of_a_split_gpu_cuda_uses_the_first_device():
    (reading,) = opened(FakeNvml([split_h200()])).read()
    assert reading.uuid == "MIG-33"


def test_a_split_gpu_without_devices_is_no_gpu():
    gpus = opened(FakeNvml([h200(split=True)]))
    assert gpus.read() == ()
    assert "MIG" in gpus.why_none


# --------------------------------------------------------------------------- processes


def test_our_processes_are_told_from_others(monkeypatch):
    monkeypatch.setattr("fulltilt.probes.gpu._numbers_are_the_drivers", lambda proc: True)  # also in a container
    (reading,) = opened(shared_gpu(our_pid=os.getpid(), other_pid=2**22 + 1)).read()
    ours, other = reading.processes
    assert (ours.pid, ours.ours, ours.vram_used_bytes) == (os.getpid(), True, 5 * GIB)
    assert ours.name.startswith(("python", "pytest"))
    assert (other.ours, other.name, other.vram_used_bytes) == (False, f"process-{2**22 + 1}", 6 * GIB)


# --------------------------------------------------------------------------- a GPU lost in mid-run


def test_a_lost_gpu_is_said_to_be_lost_and_the_others_go_on():
    clock = FakeClock()
    gpus = opened(lost_gpu(clock, after_s=10))
    assert [reading.lost for reading in gpus.read()] == [False, False]
    clock.advance(10)
    first, second = gpus.read()
    assert (first.lost, first.util_pct) == (False, 90.0)
    assert (second.lost, second.util_pct, second.name, second.index) == (True, None, "Tesla T4", 1)
    gpus.close()


def test_a_gpu_lost_before_we_came_does_not_hide_the_others():
    gpus = opened(lost_gpu(FakeClock(20), after_s=10))
    assert [reading.uuid for reading in gpus.read()] == [t4(0).uuid]


def test_losing_the_only_gpu_with_gpm_closes_quietly():
    clock = FakeClock()
    with opened(FakeNvml([h200(lost_after_s=5)], clock)) as gpus:
        clock.advance(6)
        assert gpus.read()[0].lost


def test_closing_gives_everything_back():
    nvml = one_h200()
    opened(nvml).close()
    assert nvml.sessions == 0
    assert nvml.samples == {}


# --------------------------------------------------------------------------- the cost of slow calls


def test_energy_is_asked_for_so_seldom_that_it_stays_in_budget():
    clock = FakeClock()
    function, call_s = "nvmlDeviceGetTotalEnergyConsumption", 0.01
    nvml = FakeNvml([t4(0), t4(1)], clock, slow={function: call_s})
    gpus = opened(nvml)
    seen = [0, 0]
    for _ in range(200):
        for reading in gpus.read():
            seen[reading.index] += reading.energy_j is not None
        clock.advance(1)
    assert seen[0] > 3
    assert abs(seen[0] - seen[1]) <= 1, "each GPU has its turn"
    assert call_s * nvml.calls[function] / clock() < 0.0025


def test_with_gpm_pcie_rates_come_with_it():
    clock = FakeClock()
    nvml = FakeNvml([h200()], clock)
    gpus = opened(nvml)
    clock.advance(1)
    (reading,) = gpus.read()
    assert reading.pcie_rx_bytes_per_s == pytest.approx(1000 * 1024**2)


def test_two_threads_never_stand_in_the_driver_at_once():
    """Two samplers of one process, an engine's and a recording's, ended in a segmentation fault in NVML."""
    inside, most = 0, 0

    class Slow:
        NVMLError = pynvml.NVMLError

        def nvmlInit(self):
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            time.sleep(0.002)
            inside -= 1

        nvmlShutdown = nvmlGpmSampleGet = nvmlInit

    def visit():
        nvml = Nvml(Slow())
        for _ in range(10):
            nvml.start()
            nvml.query("nvmlGpmSampleGet")
            nvml.stop()

    threads = [threading.Thread(target=visit) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
