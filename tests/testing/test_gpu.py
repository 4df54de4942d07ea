import inspect

import pynvml
import pytest

from fulltilt.testing import FakeClock, FakeNvml, h200, lost_gpu, no_driver, t4, two_t4s

ANSWERS = [name for name in vars(FakeNvml) if name.startswith("nvml")]


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_take_the_arguments_of_the_real_functions(name):
    real = list(inspect.signature(getattr(pynvml, name)).parameters)
    fake = list(inspect.signature(getattr(FakeNvml, name)).parameters)
    assert fake == ["self", *real]


def test_a_wrong_call_fails_as_with_the_real_module():
    nvml = two_t4s()
    nvml.nvmlInit()
    with pytest.raises(TypeError):
        nvml.nvmlDeviceGetHandleByIndex()
    with pytest.raises(TypeError):
        nvml.nvmlGpmMigSampleGet(nvml.gpus[0], 1)
    with pytest.raises(AttributeError):
        nvml.nvmlDeviceGetHapiness  # noqa: B018 - a name that NVML does not have


def test_constants_structures_and_errors_are_the_real_ones():
    nvml = two_t4s()
    assert nvml.NVML_CLOCK_SM == pynvml.NVML_CLOCK_SM
    assert nvml.NVMLError is pynvml.NVMLError
    assert nvml.c_nvmlGpmMetricsGet_t is pynvml.c_nvmlGpmMetricsGet_t


def test_nothing_answers_before_a_session_begins():
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        two_t4s().nvmlDeviceGetCount()


def test_what_the_fake_does_not_know_is_not_supported():
    nvml = two_t4s()
    nvml.nvmlInit()
    with pytest.raises(pynvml.NVMLError_NotSupported):
        nvml.nvmlDeviceGetFanSpeed(nvml.gpus[0])


def test_no_driver_fails_to_begin():
    with pytest.raises(pynvml.NVMLError_LibraryNotFound):
        no_driver().nvmlInit()


def test_figures_follow_the_clock():
    clock = FakeClock()
    nvml = FakeNvml([t4(util_pct=lambda t_s: 10 * t_s)], clock)
    nvml.nvmlInit()
    clock.advance(7)
    assert nvml.nvmlDeviceGetUtilizationRates(nvml.gpus[0]).gpu == 70


def test_a_lost_gpu_stops_answering_at_its_time():
    clock = FakeClock()
    nvml = lost_gpu(clock, after_s=3)
    nvml.nvmlInit()
    first, second = nvml.gpus
    nvml.nvmlDeviceGetPowerUsage(second)
    clock.advance(3)
    nvml.nvmlDeviceGetPowerUsage(first)
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        nvml.nvmlDeviceGetPowerUsage(second)


def test_gpm_means_cover_the_time_between_two_samples():
    clock = FakeClock()
    nvml = FakeNvml([h200(sm_active_pct=lambda t_s: 100.0 if t_s >= 1 else 0.0)], clock)
    nvml.nvmlInit()
    first, second = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
    nvml.nvmlGpmSampleGet(nvml.gpus[0], first)
    clock.advance(2)
    nvml.nvmlGpmSampleGet(nvml.gpus[0], second)
    request = pynvml.c_nvmlGpmMetricsGet_t()
    request.numMetrics, request.sample1, request.sample2 = 1, first, second
    request.metrics[0].metricId = pynvml.NVML_GPM_METRIC_SM_UTIL
    with pytest.raises(pynvml.NVMLError_ArgumentVersionMismatch):
        nvml.nvmlGpmMetricsGet(request)
    request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
    nvml.nvmlGpmMetricsGet(request)
    assert request.metrics[0].value == pytest.approx(50.0)


def test_the_clock_does_not_go_back():
    with pytest.raises(ValueError):
        FakeClock().advance(-1)
