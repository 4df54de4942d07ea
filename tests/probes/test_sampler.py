import statistics
import threading
import time

import pytest

from fulltilt.probes.gpu import Gpus
from fulltilt.probes.host import HostProbe
from fulltilt.probes.sampler import Sampler
from fulltilt.records import HostReading
from fulltilt.testing import FakeNvml, h200, no_driver, t4, two_t4s


class StubHost:
    def __init__(self, reads=lambda: HostReading(load_1min=1.0)):
        self.reads = reads

    def read(self):
        return self.reads()


def no_gpus():
    return Gpus.open(no_driver())


def wait_for(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert condition()


def test_samples_reach_the_sink_with_the_time_since_t0():
    samples = []
    gpus = Gpus.open(two_t4s(), environ={})
    with Sampler(samples.append, gpus=gpus, host=StubHost(), interval_s=0.05, t0=time.monotonic() - 100):
        wait_for(lambda: len(samples) >= 3)
    times = [sample.t_s for sample in samples]
    assert times == sorted(times)
    assert 100 <= times[0] < 120
    assert samples[0].host.load_1min == 1.0
    assert [gpu.name for gpu in samples[0].gpus] == ["Tesla T4", "Tesla T4"]


def test_a_job_shorter_than_the_interval_has_a_first_and_a_last_sample():
    samples = []
    with Sampler(samples.append, gpus=no_gpus(), host=StubHost(), interval_s=1000):
        wait_for(lambda: samples)
    assert len(samples) == 2


def test_after_stopping_there_are_no_more_samples_and_no_thread():
    samples = []
    sampler = Sampler(samples.append, gpus=no_gpus(), host=StubHost(), interval_s=0.01)
    sampler.start()
    sampler.start()
    wait_for(lambda: samples)
    sampler.stop()
    sampler.stop()
    count = len(samples)
    time.sleep(0.05)
    assert len(samples) == count
    assert not [thread for thread in threading.enumerate() if thread.name == "fulltilt-sampler"]


def test_a_failing_probe_leaves_its_part_empty_and_the_rest_goes_on():
    def broken():
        raise OSError("no /proc today")

    samples = []
    gpus = Gpus.open(two_t4s(), environ={})
    with Sampler(samples.append, gpus=gpus, host=StubHost(broken), interval_s=0.01):
        wait_for(lambda: len(samples) >= 3)
    assert samples[-1].host == HostReading()
    assert len(samples[-1].gpus) == 2


def test_a_failing_sink_is_called_again():
    calls = []

    def sink(sample):
        calls.append(sample)
        if len(calls) == 1:
            raise RuntimeError("disk full")

    with Sampler(sink, gpus=no_gpus(), host=StubHost(), interval_s=0.01):
        wait_for(lambda: len(calls) >= 3)


def test_a_hanging_driver_does_not_keep_the_job_from_ending(monkeypatch):
    monkeypatch.setattr("fulltilt.probes.sampler._STOP_TIMEOUT_S", 0.1)
    release = threading.Event()
    sampler = Sampler(lambda sample: None, gpus=no_gpus(), host=StubHost(lambda: release.wait(30) and HostReading()))
    sampler.start()
    start_s = time.monotonic()
    assert not sampler.stop(), "it has not ended: what it reads must not be closed"
    assert time.monotonic() - start_s < 10
    release.set()


def test_without_a_host_probe_it_opens_its_own():
    samples = []
    with Sampler(samples.append, gpus=no_gpus(), interval_s=0.1):
        wait_for(lambda: len(samples) >= 3)
    assert samples[-1].host.cpu_pct is not None


def test_an_interval_of_nothing_is_refused():
    with pytest.raises(ValueError):
        Sampler(print, gpus=no_gpus(), interval_s=0)


@pytest.mark.quiet
def test_sampling_at_one_hertz_costs_under_one_percent_of_a_core():
    # A second's work, many times over: CPU time of one take of the real host probe and of eight GPUs.
    clock = time.monotonic
    nvml = FakeNvml([t4(number) for number in range(4)] + [h200(uuid=f"GPU-{n}") for n in range(4)], clock)
    samples = []
    sampler = Sampler(samples.append, gpus=Gpus.open(nvml, environ={}), host=HostProbe())
    host = sampler._host
    sampler._take(host)
    costs = []
    for _ in range(20):
        time.sleep(0.06)
        start_s = time.thread_time()
        sampler._take(host)
        costs.append(time.thread_time() - start_s)
    assert all(sample.host.mem_total_bytes and len(sample.gpus) == 8 for sample in samples)
    # The middle one: where a hypervisor takes the CPU away, that counts as CPU time of whoever had it.
    assert statistics.median(costs) < 0.010
