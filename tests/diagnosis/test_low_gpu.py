from fulltilt.diagnosis import low_gpu_warning
from fulltilt.records import Buckets, HotLine
from tests.diagnosis.examples import loader, workers

STARVED = Buckets(startup_s=5.0, data_wait_s=62.0, compute_s=11.0, host_code_s=27.0)


def test_the_warning_has_its_words_with_the_likely_cause_first() -> None:
    feeding = loader(batch_size=8192, num_workers=8, prefetch_factor=16)
    assert low_gpu_warning(11.0, STARVED, [feeding], usable_cpus=16.0) == "\n".join(
        (
            "GPU utilization is low (11 %)",
            "- most likely: waiting for data takes 62 % of the training time",
            "- increase num_workers (current: 8) at train.py:31",
            "- increase prefetch_factor (current: 16)",
            "- a larger batch_size (current: 8192) does not help while data is late",
        )
    )


def test_workers_that_fill_the_cpus_are_not_raised() -> None:
    warning = low_gpu_warning(11.0, STARVED, [loader(num_workers=8)], usable_cpus=8.0)
    assert warning is not None
    assert "num_workers (current: 8) already fills the 8 usable CPUs" in warning
    warning = low_gpu_warning(11.0, STARVED, [loader(num_workers=7)], usable_cpus=8.0)
    assert "increase num_workers (current: 7)" in str(warning), "as the verdict may say"


def test_workers_that_wait_are_not_said_to_fill_the_cpus() -> None:
    waiting = workers(fetch_s=50.0, fetch_cpu_s=1.0, cpu_wait_s=0.2, lines=(HotLine("data.py:9", "read", 49.0, "f()"),))
    warning = low_gpu_warning(11.0, STARVED, [loader(num_workers=8)], 8.0, [waiting])
    assert warning is not None
    assert "fills" not in warning
    assert "- the workers wait in f() at data.py:9 instead of computing" in warning


def test_a_source_with_a_rate_of_its_own_wants_no_worker() -> None:
    ahead = loader(wait_s=20.0, wait_cpu_s=0.1, wait_slope=(-1.0, 0.1))
    warning = low_gpu_warning(None, STARVED, [ahead], 2.0)
    assert warning is not None
    assert "increase num_workers" not in warning
    assert "- make the source of the batches faster at train.py:31" in warning


def test_a_gpu_that_is_short_of_work_wants_a_larger_batch() -> None:
    launching = Buckets(compute_s=20.0, host_code_s=80.0)
    warning = low_gpu_warning(20.0, launching, [loader(num_workers=2)], usable_cpus=8.0)
    assert warning is not None
    assert warning.splitlines()[1:] == [
        "- most likely: the script's own code takes 80 % of the training time, or the kernels are launched too slowly",
        "- increase batch_size (current: 32)",
        "- num_workers (current: 2) keeps up",
    ]


def test_a_busy_gpu_or_a_job_that_has_not_begun_gets_no_warning() -> None:
    assert low_gpu_warning(30.0, STARVED, [loader()], 8.0) is None
    assert low_gpu_warning(5.0, Buckets(startup_s=20.0), [loader()], 8.0) is None


def test_without_a_gpu_the_share_of_data_wait_decides() -> None:
    warning = low_gpu_warning(None, STARVED, [loader(num_workers=0)], 2.0)
    assert warning is not None
    assert warning.startswith("Waiting for data takes 62 % of the training time\n- increase")
    assert "- increase num_workers (current: 0) at train.py:31" in warning
    assert low_gpu_warning(None, Buckets(data_wait_s=20.0, compute_s=80.0), [loader()], 2.0) is None


def test_batches_made_by_hand_get_a_loader() -> None:
    warning = low_gpu_warning(None, STARVED, [], 2.0)
    assert warning is not None
    assert "a DataLoader with workers (current: none)" in warning


def test_without_a_gpu_the_wait_is_named_not_the_computing() -> None:
    warning = low_gpu_warning(None, Buckets(data_wait_s=4.2, compute_s=4.7, host_code_s=1.1), [], 2.0)
    assert warning is not None
    assert warning.startswith("Waiting for data takes 42 % of the training time\n")


def test_of_two_loaders_the_one_that_is_waited_for_is_named() -> None:
    fast = loader(num_workers=0, where="train.py:3", wait_s=0.4)
    slow = loader(num_workers=1, where="train.py:4", wait_s=9.0)
    warning = low_gpu_warning(None, STARVED, [fast, slow], 8.0)
    assert warning is not None
    assert "current: 1) at train.py:4" in warning
