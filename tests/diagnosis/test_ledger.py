from dataclasses import replace
from typing import Any

import pytest

from fulltilt.diagnosis.evidence import gather
from fulltilt.diagnosis.ledger import (
    close_buckets,
    close_ranks,
    make_ledger,
    mean_gpu_step,
    mean_step,
    measure_throughput,
)
from fulltilt.diagnosis.stragglers import compare_ranks
from fulltilt.records import Buckets, GpuStep, KernelRecord, Phases, Span
from tests.diagnosis.examples import BATCH, gpu_rank, loader, rank, run_of, spans_of, workers


def step_span(t0_s: float, t1_s: float, buckets: Buckets, steps: int = 1, samples: int | None = None) -> Span:
    return Span(t0_s, t1_s, 0, steps, steps, samples, buckets)


def test_time_before_the_first_span_is_startup_and_after_the_last_unattributed() -> None:
    spans = (step_span(3.0, 9.0, Buckets(compute_s=6.0)),)
    assert close_buckets(spans, 10.0) == Buckets(startup_s=3.0, compute_s=6.0, unattributed_s=1.0)


def test_a_gap_between_spans_is_unattributed() -> None:
    spans = (step_span(0.0, 2.0, Buckets(compute_s=2.0)), step_span(5.0, 6.0, Buckets(compute_s=1.0)))
    assert close_buckets(spans, 6.0) == Buckets(compute_s=3.0, unattributed_s=3.0)


def test_spans_that_overlap_or_hold_too_much_are_scaled_to_their_length() -> None:
    spans = (step_span(0.0, 4.0, Buckets(compute_s=4.0)), step_span(2.0, 6.0, Buckets(data_wait_s=8.0)))
    assert close_buckets(spans, 6.0) == Buckets(compute_s=4.0, data_wait_s=2.0)


def test_what_a_span_leaves_out_is_unattributed() -> None:
    assert close_buckets((step_span(0.0, 4.0, Buckets(compute_s=3.0)),), 4.0).unattributed_s == 1.0


def test_without_spans_all_is_startup_and_without_ranks_nothing_is_known() -> None:
    unborn = run_of(rank(), spans=((),), run={"wall_s": 7.0})
    assert make_ledger(unborn).buckets == Buckets(startup_s=7.0)
    assert make_ledger(run_of(run={"wall_s": 7.0})).buckets == Buckets(unattributed_s=7.0)


def test_a_running_job_ends_with_its_last_span() -> None:
    running = run_of(rank(), compute=90.0, run={"wall_s": None, "state": "running"})
    assert make_ledger(running).wall_s == 100.0


def test_several_ranks_are_the_mean_of_them() -> None:
    run = run_of(rank(0), rank(1), spans=(spans_of(compute=100.0), spans_of(compute=60.0, communication=40.0)))
    ledger = make_ledger(run)
    assert (ledger.buckets.compute_s, ledger.buckets.communication_s, ledger.wall_s) == (80.0, 20.0, 110.0)


def test_throughput_is_what_a_stopwatch_shows_from_the_first_step_to_the_last() -> None:
    spans = (
        Span(0.0, 10.0, 0, 0, 0, None, Buckets(startup_s=10.0)),
        step_span(10.0, 30.0, Buckets(compute_s=20.0), steps=200, samples=6400),
        Span(30.0, 40.0, 200, 0, 0, None, Buckets(validation_s=10.0)),
        step_span(40.0, 60.0, Buckets(compute_s=20.0), steps=200, samples=6400),
        Span(60.0, 90.0, 400, 0, 0, None, Buckets(validation_s=30.0)),
    )
    throughput = measure_throughput(run_of(rank(), spans=(spans,)))
    assert (throughput.samples_per_s, throughput.steps_per_s) == (256.0, 8.0)
    assert (throughput.steps, throughput.samples) == (400, 12800)


def test_the_first_step_is_left_out_of_the_rates_but_not_of_the_counts() -> None:
    spans = (
        step_span(10.0, 14.0, Buckets(compute_s=4.0), steps=1, samples=32),
        Span(14.0, 15.0, 1, 0, 0, None, Buckets(validation_s=1.0)),
        step_span(15.0, 24.0, Buckets(compute_s=9.0), steps=10, samples=320),
    )
    throughput = measure_throughput(run_of(rank(), spans=(spans,)))
    assert (throughput.samples_per_s, throughput.steps_per_s) == (32.0, 1.0)
    assert (throughput.steps, throughput.samples) == (11, 352)


def test_startup_inside_the_first_step_does_not_count_against_the_rate() -> None:
    span = step_span(10.0, 25.0, Buckets(startup_s=5.0, compute_s=10.0), steps=100, samples=3200)
    assert measure_throughput(run_of(rank(), spans=((span,),))).steps_per_s == 10.0


def test_samples_of_ranks_add_up_and_are_none_without_a_loader() -> None:
    assert measure_throughput(run_of(rank(0), rank(1), compute=100.0)).samples_per_s == 2 * 10 * BATCH
    uncounted = run_of(rank(), spans=(spans_of(samples=False, compute=100.0),))
    assert measure_throughput(uncounted).samples_per_s is None
    assert measure_throughput(uncounted).steps_per_s == 10.0


def test_a_job_without_steps_has_no_rates() -> None:
    throughput = measure_throughput(run_of(rank(), spans=((spans_of()[0],),)))
    assert (throughput.samples_per_s, throughput.steps_per_s, throughput.steps) == (None, None, 0)


def test_the_mean_step_divides_sums_by_steps_and_keeps_unmeasured_parts_unmeasured() -> None:
    spans = tuple(
        replace(span, phases=Phases(load_s=20.0, forward_s=5.0, gpu_busy_s=busy_s))
        for span, busy_s in zip(spans_of(compute=100.0)[1:] * 2, (10.0, None), strict=True)
    )
    step = mean_step(run_of(rank(), spans=(spans,)))
    assert step is not None
    assert (step.load_s, step.forward_s, step.gpu_busy_s) == (0.02, 0.005, None)
    assert mean_step(run_of(rank())) is None


def test_the_first_step_which_is_part_warm_up_is_not_in_the_mean_step() -> None:
    first, *_ = spans_of(compute=100.0)[1:]
    spans = (
        replace(first, steps=1, phases=Phases(load_s=9.0, forward_s=1.0)),
        replace(first, phases=Phases(load_s=20.0, forward_s=5.0)),
    )
    step = mean_step(run_of(rank(), spans=(spans,)))
    assert step is not None
    assert (step.load_s, step.forward_s) == (0.02, 0.005)


def test_gaps_between_kernels_are_no_work_of_the_gpu() -> None:
    spans = (replace(spans_of(compute=100.0)[1], phases=Phases(gpu_busy_s=90.0, gpu_idle_s=10.0)),)
    kernels = KernelRecord(steps=9, busy_s=0.06, copies_s=0.0, kernels=100, tensor_core_share=None)

    def gpu_step(**measured: Any) -> GpuStep | None:
        return mean_gpu_step(run_of(gpu_rank(**measured), spans=(spans,)))

    assert gpu_step(kernels=kernels, gpu_busy_step_s=0.09) == GpuStep(0.06, pytest.approx(0.03), 0.01)
    assert gpu_step(kernels=kernels, gpu_busy_step_s=0.05) == GpuStep(0.06, 0.0, 0.01)
    assert gpu_step() == GpuStep(None, None, 0.01)
    assert mean_gpu_step(run_of(rank())) is None


def test_gaps_between_short_kernels_are_launching_and_long_kernels_have_none() -> None:
    def buckets(kernels: int) -> Buckets:
        traced = KernelRecord(steps=9, busy_s=0.006, copies_s=0.001, kernels=kernels, tensor_core_share=None)
        run = run_of(gpu_rank(kernels=traced, gpu_busy_step_s=0.09), spans=(spans_of(compute=90.0, host_code=10.0),))
        return make_ledger(run).buckets

    assert (buckets(1000).compute_s, buckets(1000).host_code_s) == pytest.approx((7.0, 93.0))
    assert (buckets(100).compute_s, buckets(100).host_code_s) == pytest.approx((90.0, 10.0))


def test_the_slowest_rank_is_the_one_with_most_work_of_its_own() -> None:
    spans = (
        spans_of(compute=60.0, communication=40.0),
        spans_of(compute=60.0, host_code=35.0, communication=5.0),
        spans_of(compute=70.0, communication=20.0, unattributed=10.0),
    )
    run = run_of(*(rank(n) for n in range(3)), spans=spans)
    ranks = compare_ranks(run, close_ranks(run))
    assert [r.slowest for r in ranks] == [False, True, False]
    assert [r.own_work_s for r in ranks] == pytest.approx([60.0, 95.0, 70.0])
    # The third rank exchanged for 20 s only, so it cannot have waited for 25.
    assert [r.waits_s for r in ranks] == pytest.approx([35.0, 0.0, 20.0])


# --------------------------------------------------------------------------- ceilings


def test_the_compute_ceiling_is_samples_over_busy_time_and_ranks_add_up() -> None:
    on_cpu = gather(run_of(rank(), data_wait=62.0, compute=38.0))
    assert on_cpu.ceilings.compute_samples_per_s == pytest.approx(32_000 / 38)
    on_gpus = gather(run_of(gpu_rank(0, gpu_busy_step_s=0.04), gpu_rank(1, gpu_busy_step_s=0.08), compute=100.0))
    assert on_gpus.ceilings.compute_samples_per_s == pytest.approx(BATCH / 0.04 + BATCH / 0.08)


def test_accumulation_counts_the_samples_of_a_step() -> None:
    run = run_of(gpu_rank(gpu_busy_step_s=0.1), spans=(spans_of(batches_per_step=4, compute=100.0),))
    assert gather(run).ceilings.compute_samples_per_s == pytest.approx(4 * BATCH / 0.1)


def test_the_compute_ceiling_is_unknown_when_samples_were_not_counted() -> None:
    assert gather(run_of(rank(), spans=(spans_of(samples=False, compute=1.0),))).ceilings.compute_samples_per_s is None


def test_the_loader_ceiling_without_workers_is_samples_over_time_in_next() -> None:
    run = run_of(rank(loaders=(loader(wait_s=50.0, wait_cpu_s=1.0),)), data_wait=50.0, compute=50.0)
    assert gather(run).ceilings.loader_samples_per_s == pytest.approx(BATCH / 0.05)


def test_the_loader_ceiling_with_workers_is_their_rate_bounded_by_the_cpus() -> None:
    feeding = loader(num_workers=4, wait_s=30.0, wait_cpu_s=0.1)
    waiting = workers(fetch_s=160.0, fetch_cpu_s=8.0, process_cpu_s=8.0, cpu_wait_s=0.0)
    run = run_of(gpu_rank(workers=(waiting,), loaders=(feeding,)), data_wait=30.0, compute=70.0)
    assert gather(run).ceilings.loader_samples_per_s == pytest.approx(4 * BATCH / 0.160)
    computing = workers(fetch_s=800.0, fetch_cpu_s=790.0, process_cpu_s=790.0, cpu_wait_s=0.0)
    crowd = loader(num_workers=16, wait_s=30.0, wait_cpu_s=0.1)
    bounded = gather(run_of(gpu_rank(workers=(computing,), loaders=(crowd,)), data_wait=30.0, compute=70.0))
    assert bounded.ceilings.loader_samples_per_s == pytest.approx(8 * BATCH / 0.790)


def test_the_loader_ceiling_of_a_starved_job_is_what_it_delivers() -> None:
    run = run_of(
        gpu_rank(workers=(workers(),), loaders=(loader(num_workers=2, wait_s=95.0, wait_cpu_s=1.0),)),
        data_wait=95.0,
        compute=5.0,
    )
    assert gather(run).ceilings.loader_samples_per_s == pytest.approx(320.0)


def test_the_loader_ceiling_is_never_below_what_was_delivered() -> None:
    slow_at_first = workers(fetch_s=160.0, fetch_cpu_s=150.0, process_cpu_s=150.0, cpu_wait_s=0.0)
    feeding = loader(num_workers=1, wait_s=70.0, wait_cpu_s=0.1)
    run = run_of(gpu_rank(workers=(slow_at_first,), loaders=(feeding,)), data_wait=70.0, compute=30.0)
    assert gather(run).ceilings.loader_samples_per_s == pytest.approx(320.0), "a mean of 160 ms a batch says 200"


def test_rebuilding_batches_in_the_training_thread_bounds_the_loader() -> None:
    feeding = loader(num_workers=4, wait_s=40.0, wait_cpu_s=40.0)
    fast = workers(fetch_s=4.0, fetch_cpu_s=4.0, process_cpu_s=5.0, idle_s=300.0)
    run = run_of(gpu_rank(workers=(fast,), loaders=(feeding,)), data_wait=40.0, compute=60.0)
    assert gather(run).ceilings.loader_samples_per_s == pytest.approx(BATCH / 0.040)


def test_several_training_loaders_have_no_single_ceiling() -> None:
    both = (loader(wait_s=5.0), loader(loader_id=2, wait_s=9.0))
    evidence = gather(run_of(rank(loaders=both), data_wait=14.0, compute=86.0))
    assert evidence.ceilings.loader_samples_per_s is None
    assert evidence.loader is not None
    assert evidence.loader.loader_id == 2  # training waits for it most
