"""A process that a rank starts to train on the side is no rank of the job; real ranks stay, whoever starts them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fulltilt.diagnosis import answer
from fulltilt.diagnosis.evidence import without_side_jobs
from fulltilt.diagnosis.gpu_summary import dense_peak
from fulltilt.records import Buckets, PrecisionRecord, Run, Span, Utilisation
from tests.diagnosis.examples import STEPS, gpu, gpu_rank, rank, run_of, sampled


def two_processes(parents_last_s: float = 100.0, **changes: Any) -> Run:
    """One that trains until ``parents_last_s``, and one that it starts, which trains from 40 s to 60 s."""
    alone = run_of(rank(pid=10), data_wait=50.0, compute=50.0)
    above = Span(0.0, parents_last_s, 0, 100, 100, 800, Buckets(compute_s=parents_last_s))
    beside = Span(40.0, 60.0, 0, 4000, 0, None, Buckets(compute_s=20.0))
    child = rank(1, **{"pid": 11, "parent_pid": 10, **changes})
    return replace(alone, ranks=(*alone.ranks, child), spans=((above,), (beside,)))


def test_a_probe_that_a_rank_forks_is_part_of_that_rank() -> None:
    run = two_processes()
    assert [rank.pid for rank in without_side_jobs(run).ranks] == [10]
    assert answer(run).throughput.steps == 100


@pytest.mark.parametrize(
    "run",
    [
        two_processes(parents_last_s=30.0),  # it sought a learning rate, and then started its ranks
        two_processes(world_size=2),  # a rank that the first one forked
        two_processes(parent_pid=9),  # a launcher's
        two_processes(parent_pid=None),  # of an older record
        two_processes(hostname="another"),
    ],
)
def test_ranks_stay(run: Run) -> None:
    assert without_side_jobs(run) is run


# --------------------------------------------------------------------------- AU and MFU


def test_au_is_compute_and_mfu_the_flops_over_the_time_after_start_up() -> None:
    """A thousand steps of 49.47 TFLOP in 100 s: half of the data sheet's 989.4 in bfloat16."""
    counted = gpu_rank(flops_per_call=49.47e12, optimizer_calls=STEPS)
    used = answer(run_of(counted, samples=sampled(gpu()), data_wait=20.0, compute=80.0)).utilisation
    assert used.au == pytest.approx(0.8)
    assert used.mfu == pytest.approx(0.5)
    assert (used.peak_flops_per_s, used.peak_precision) == (pytest.approx(989.4e12), "bfloat16")


def test_a_step_of_two_optimizers_holds_the_work_of_both() -> None:
    counted = gpu_rank(flops_per_call=10e12, optimizer_calls=2 * STEPS)
    assert answer(run_of(counted, samples=sampled(gpu()))).utilisation.flops_per_step == pytest.approx(20e12)


def test_what_was_not_measured_is_not_told() -> None:
    assert answer(run_of(rank())).utilisation == Utilisation()
    uncounted = answer(run_of(gpu_rank(), samples=sampled(gpu()))).utilisation
    assert (uncounted.au, uncounted.mfu) == (pytest.approx(1.0), None)
    unknown = gpu_rank(flops_per_call=1e12)
    assert answer(run_of(unknown, samples=sampled(gpu(name="NVIDIA Unheard of")))).utilisation.mfu is None
    sharded = gpu_rank(sharded=True, world_size=2)
    assert answer(run_of(sharded, samples=sampled(gpu()))).utilisation.au is None


@pytest.mark.parametrize(
    ("name", "autocast", "tf32", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", False, 989.4e12),
        ("NVIDIA H100 PCIe", "bfloat16", False, 756e12),
        ("NVIDIA A100-SXM4-80GB", None, True, 156e12),
        ("NVIDIA A100-SXM4-80GB", None, False, 19.5e12),
        ("Tesla T4", None, True, 8.1e12),
        ("NVIDIA A10G", "bfloat16", False, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16", False, None),
    ],
)
def test_the_peak_is_that_of_the_gpu_and_its_arithmetic(
    name: str, autocast: str | None, tf32: bool, peak: float | None
) -> None:
    precision = PrecisionRecord(autocast, "float32", tf32, False)
    assert dense_peak(name, precision)[1] == (None if peak is None else pytest.approx(peak))
