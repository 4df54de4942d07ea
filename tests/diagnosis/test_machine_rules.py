from dataclasses import replace
from typing import Any

import pytest

from fulltilt.diagnosis import answer
from fulltilt.diagnosis.evidence import gather
from fulltilt.diagnosis.rules.data_loading import input_cpu_bound
from fulltilt.diagnosis.rules.gpu import gpu_shared, throttled
from fulltilt.diagnosis.rules.machine import (
    cpu_affinity,
    cpu_oversubscribed,
    gil_contended,
    launch_contended,
    memory_pressure,
    worker_memory_growth,
)
from fulltilt.records import (
    Abstention,
    CpuCapacity,
    Finding,
    GpuProcess,
    HotLine,
    LiveRecord,
    MemoryGrowthRecord,
    Run,
    Settings,
    ThreadRecord,
)
from tests.diagnosis.examples import gpu, gpu_rank, host, loader, machine, rank, run_of, sampled, workers


def found(judgement: object) -> Finding:
    assert isinstance(judgement, Finding)
    return judgement


def on_gpu(**reading: Any) -> Run:
    return run_of(gpu_rank(), samples=sampled(gpu(**reading)), compute=100.0)


# --------------------------------------------------------------------------- memory_pressure


def test_reading_back_swap_is_fatal_and_comes_first() -> None:
    full = host(mem_used_bytes=62 * 10**9, swap_in_bytes_per_s=40e6)
    feeding = (loader(num_workers=8, prefetch_factor=4),)
    run = run_of(rank(loaders=feeding), samples=sampled(host_reading=full), data_wait=40.0, compute=60.0)
    finding = found(memory_pressure(gather(run)))
    assert (finding.severity, finding.predicted_speedup) == ("severe", None)
    assert finding.share == pytest.approx(100 / 100)
    assert finding.evidence == ("38.1 MiB/s are read back from swap", "RAM is at 97 % of its limit")
    assert finding.fix == ("Lower num_workers 8 → 4 at train.py:31 (30.5 MiB of batches are kept ready).")
    assert answer(run).verdict.code == "memory_pressure"


def test_a_full_container_is_judged_by_its_own_limit() -> None:
    full = host(mem_limit_bytes=8 * 10**9, mem_used_bytes=int(7.6e9))
    finding = found(memory_pressure(gather(run_of(rank(), samples=sampled(host_reading=full)))))
    assert finding.severity == "warn"
    assert finding.evidence == ("RAM is at 95 % of its limit",)


def test_a_gpu_that_frees_its_cache_is_short_of_memory() -> None:
    run = run_of(gpu_rank(alloc_retries=12), samples=sampled(gpu()))
    finding = found(memory_pressure(gather(run)))
    assert finding.severity == "warn"
    assert finding.evidence == ("the GPU's allocator ran out and freed its cache 12 times",)
    assert "gradient checkpointing" in finding.fix


def test_a_full_gpu_that_never_retried_is_a_remark() -> None:
    finding = found(memory_pressure(gather(on_gpu(vram_used_bytes=139 * 10**9))))
    assert finding.severity == "info"
    assert answer(on_gpu(vram_used_bytes=139 * 10**9)).findings[0].code == "compute_bound"


def test_memory_with_room_is_left_alone_and_unread_memory_not_judged() -> None:
    assert memory_pressure(gather(on_gpu())) is None
    assert memory_pressure(gather(run_of(rank()))) == Abstention("memory_pressure", "readings of memory use")


# --------------------------------------------------------------------------- worker_memory_growth


def growing(used: int = 20 * 10**9, growth: MemoryGrowthRecord | None = None, **changes: Any) -> Run:
    """Four workers, each of which grows by 10 MB a second."""
    grown = growth or MemoryGrowthRecord(bytes=80_000_000, over_s=8.0, batches=40)
    feeding = loader(num_workers=4, **{"passes": 3, "dataset_len": 10_000_000, **changes})
    crew = workers(processes=4, growth=grown, idle_s=300.0)
    state = host(mem_used_bytes=used)
    return run_of(rank(loaders=(feeding,), workers=(crew,)), samples=sampled(host_reading=state), compute=100.0)


def test_workers_that_will_fill_the_memory_come_first() -> None:
    run = growing(objects="self.paths, a list of 1,200,000")
    finding = found(worker_memory_growth(gather(run)))
    assert (finding.severity, finding.where, finding.predicted_speedup) == ("severe", "train.py:31", None)
    assert finding.evidence == (
        "a worker's own memory grows by 9.5 MiB/s, 61 KiB a sample: 4 workers will fill the remaining 41 GiB "
        "within 18 min 20 s",
        "the data set Photos keeps Python objects: self.paths, a list of 1,200,000",
    )
    assert answer(run).verdict.code == "worker_memory_growth"


def test_a_cache_that_fits_or_a_growth_that_takes_days_is_left_alone() -> None:
    assert worker_memory_growth(gather(growing(dataset_len=100_000))) is None
    assert worker_memory_growth(gather(growing(dataset_len=1000))) is None  # new workers for each pass
    leaks = growing(dataset_len=1000, persistent_workers=True)  # 8 passes over all of it by each worker, and still
    assert found(worker_memory_growth(gather(leaks))).severity == "severe"
    copied = MemoryGrowthRecord(80_000_000, 8.0, 40, copied_bytes=79_000_000, shared_bytes=2_000_000_000)
    assert worker_memory_growth(gather(growing(growth=copied))) is None
    large = found(worker_memory_growth(gather(growing(growth=replace(copied, shared_bytes=30_000_000_000)))))
    assert "they are copies of the training process's pages; 27.9 GiB are still shared" in large.evidence
    slow = MemoryGrowthRecord(bytes=20_000_000, over_s=200.0, batches=4000)
    assert worker_memory_growth(gather(growing(growth=slow))) is None
    assert worker_memory_growth(gather(growing(growth=MemoryGrowthRecord(80_000_000, 1.0, 5)))) is None
    # A stream may fill its shuffle buffer first.
    assert worker_memory_growth(gather(growing(iterable=True, dataset_len=None))) is None


# --------------------------------------------------------------------------- cpu_affinity


def bound(cpu: CpuCapacity | None = None, on_cpus: int = 1, **changes: Any) -> Run:
    """Four workers that may run on one of eight CPUs."""
    crew = workers(processes=4, fetch_cpu_s=80.0, process_cpu_s=85.0, cpu_wait_s=75.0, cpus=on_cpus)
    feeding = loader(num_workers=4, prefetch_factor=2)
    told = {"cpus_at_start": 8, "cpus": 1, **changes}
    here = machine(cpu=cpu) if cpu is not None else machine()
    return run_of(rank(loaders=(feeding,), workers=(crew,), **told), on=here, data_wait=60.0, compute=40.0)


def test_workers_bound_by_the_process_are_told_to_be_set_free() -> None:
    finding = found(cpu_affinity(gather(bound())))
    assert finding.evidence[0] == "4 workers may run on 1 CPU of the 8 that the job may use"
    assert "the process could use 8 CPUs at first" in finding.evidence[-1]
    assert "os.sched_setaffinity" in finding.fix
    assert answer(bound()).verdict.code == "cpu_affinity"
    in_workers = found(cpu_affinity(gather(bound(cpus=8))))
    assert "a worker could use 8 CPUs at first" in in_workers.evidence[-1]


def test_a_binding_of_slurm_has_slurms_words() -> None:
    cpu = CpuCapacity(present=64, affinity=1, quota=None, usable=1.0, allotted=16)
    finding = found(cpu_affinity(gather(bound(cpu, cpus_at_start=1))))
    assert "4 workers may run on 1 CPU of the 16 that the job may use" in finding.evidence
    assert "srun --cpus-per-task=16" in finding.fix


def test_workers_with_room_or_without_a_queue_are_not_confined() -> None:
    assert cpu_affinity(gather(bound(on_cpus=5))) is None
    alone = workers(cpus=1)  # two of them, that do not queue: each may have its own CPU
    run = run_of(rank(loaders=(loader(num_workers=2),), workers=(alone,)), data_wait=60.0, compute=40.0)
    assert cpu_affinity(gather(run)) is None


# --------------------------------------------------------------------------- launch_contended


def short_of_cpus(tree_cpu_pct: float, waited_s: float | None = 30.0) -> Run:
    feeding = (loader(num_workers=12, prefetch_factor=2),)
    busy = host(tree_cpu_pct=tree_cpu_pct)
    short = gpu_rank(loaders=feeding, cpu_wait_s=waited_s, launch_s=40.0)
    return run_of(short, samples=sampled(gpu(), host_reading=busy), host_code=40.0, compute=60.0)


def test_workers_that_take_every_cpu_slow_the_launching_down() -> None:
    run = short_of_cpus(tree_cpu_pct=790.0)
    finding = found(launch_contended(gather(run)))
    assert (finding.share, finding.where) == (pytest.approx(0.3), "train.py:31")
    assert "the job's processes keep 7.9 of 8 CPUs busy" in finding.evidence
    assert "lower num_workers 12 → 6" in finding.fix
    assert [one.code for one in answer(run).findings[:2]] == ["launch_contended", "launch_bound"]


PRODUCER = ThreadRecord("produce", 40.0, (HotLine("train.py:7", "make", 30.0),))


def test_a_thread_that_takes_the_gil_is_named_and_compute_is_not_called_healthy() -> None:
    run = run_of(rank(off_cpu_s=35.0, threads=(PRODUCER,)), compute=90.0, host_code=10.0)
    finding = found(gil_contended(gather(run)))
    assert (finding.share, finding.where) == (pytest.approx(0.25), "train.py:7")  # 10 s of the 35 may be host code's
    assert "thread produce (mostly train.py:7) runs for 40 % of the time" in finding.evidence[1]
    assert finding.predicted_speedup == (1.0, 1.33)
    told = answer(run).findings
    assert [one.code for one in told] == ["gil_contended", "host_code", "compute_bound"]
    assert told[-1].fix.startswith("Once the other findings are fixed")


@pytest.mark.parametrize(
    "facts",
    [
        {"off_cpu_s": 35.0},  # no thread
        {"off_cpu_s": 13.0, "threads": (PRODUCER,)},  # in vain beside a training thread that runs all the time
        {"off_cpu_s": 35.0, "threads": (replace(PRODUCER, cpu_s=3.0),)},
        {"threads": (PRODUCER,)},  # nobody says how long it ran
    ],
)
def test_threads_that_cost_the_training_nothing_are_no_cause(facts: dict[str, Any]) -> None:
    run = run_of(rank(**facts), compute=90.0, host_code=10.0)
    assert gil_contended(gather(run)) is None


def test_a_thread_beside_slow_launching_is_named_there() -> None:
    run = run_of(gpu_rank(launch_s=40.0, threads=(PRODUCER,)), samples=sampled(gpu()), host_code=40.0, compute=60.0)
    finding = next(one for one in answer(run).findings if one.code == "launch_bound")
    assert finding.fix.startswith("Move the work of thread produce (mostly train.py:7) to a process")
    assert any("only one thread has the GIL" in fact for fact in finding.evidence)


def test_a_number_of_workers_that_live_tuning_chose_is_not_advised_against() -> None:
    run = short_of_cpus(tree_cpu_pct=790.0)
    chosen = LiveRecord(0, "settled", "", Settings(num_workers=2), Settings(num_workers=12))
    fix = found(launch_contended(gather(replace(run, ranks=(replace(run.ranks[0], live=(chosen,)),))))).fix
    assert fix.startswith("Leave the training thread a CPU: one thread in each worker")
    assert "num_workers" not in fix


def test_others_that_take_the_cpus_are_told_apart() -> None:
    finding = found(launch_contended(gather(short_of_cpus(tree_cpu_pct=150.0))))
    assert finding.fix.startswith("Other processes on the machine take the CPUs")
    assert finding.where is None


def test_a_thread_that_has_its_cpu_is_not_contended() -> None:
    assert launch_contended(gather(short_of_cpus(790.0, waited_s=0.5))) is None
    unknown = launch_contended(gather(short_of_cpus(790.0, waited_s=None)))
    assert unknown == Abstention("launch_contended", "how long the training thread waited for a CPU")


# --------------------------------------------------------------------------- cpu_oversubscribed


def crowd(**changes: Any) -> Run:
    """Eight workers on two CPUs that queue for four fifths of their time."""
    queueing = {"fetch_s": 780.0, "fetch_cpu_s": 150.0, "process_cpu_s": 155.0, "cpu_wait_s": 600.0, **changes}
    feeding = loader(num_workers=8, prefetch_factor=2, wait_s=80.0, wait_cpu_s=1.0)
    return run_of(
        rank(torch_threads=2, workers=(workers(**queueing),), loaders=(feeding,)),
        on=machine(2.0),
        data_wait=80.0,
        compute=20.0,
    )


def test_workers_that_queue_are_too_many() -> None:
    finding = found(cpu_oversubscribed(gather(crowd())))
    assert finding.share == pytest.approx(0.8 * 100 / 100)
    assert finding.evidence[:2] == (
        "8 workers and 2 training threads queue for 2 CPUs",
        "the workers spend 80 % of their runnable time in that queue",
    )
    assert finding.fix == (
        "Lower num_workers 8 → 2 at train.py:31: DataLoader(..., num_workers=2). "
        "And give the training 1 thread: torch.set_num_threads(1)."
    )
    assert finding.predicted_speedup == (1.0, 2.1)
    assert input_cpu_bound(gather(crowd())) is None
    assert answer(crowd()).verdict.code == "cpu_oversubscribed"


def test_workers_that_live_tuning_added_are_not_too_many() -> None:
    """The verdict was glued of two sentences, and advised one worker more."""
    before, after = Settings(num_workers=7), Settings(num_workers=8)
    live = LiveRecord(
        1,
        "settled",
        "nothing more paid",
        before,
        after,
        before_batches_per_s=20.0,
        before_wait_share=0.8,
        batches_per_s=30.0,
        wait_share=0.6,
    )
    run = crowd()
    verdict = answer(replace(run, ranks=(replace(run.ranks[0], live=(live,)),))).verdict
    assert verdict.code == "input_cpu_bound"
    assert "slow each other down" not in verdict.sentence


def test_a_record_of_no_usable_cpu_divides_by_nothing() -> None:
    run = replace(crowd(), samples=sampled(host_reading=host(cpu_pct=99.0, tree_cpu_pct=40.0)))
    cpu = replace(run.run.machine.cpu, usable=0.0)
    damaged = replace(run, run=replace(run.run, machine=replace(run.run.machine, cpu=cpu)))
    assert gather(damaged).host.others_share == 0.0


def test_workers_that_queue_behind_other_processes_are_not_called_too_many() -> None:
    crowded = replace(crowd(), samples=sampled(host_reading=host(cpu_pct=99.0, tree_cpu_pct=40.0)))
    alone = replace(crowd(), samples=sampled(host_reading=host(cpu_pct=99.0, tree_cpu_pct=190.0)))
    assert gather(crowded).host.others_share == pytest.approx(0.8)
    assert cpu_oversubscribed(gather(crowded)) is None
    told = found(input_cpu_bound(gather(crowded))).evidence
    assert any("other processes had 80 % of the CPUs" in fact for fact in told)
    assert answer(crowded).verdict.code == "input_cpu_bound"
    assert answer(alone).verdict.code == "cpu_oversubscribed"


def test_workers_that_do_not_queue_or_have_their_cpus_are_left_alone() -> None:
    assert cpu_oversubscribed(gather(crowd(cpu_wait_s=10.0))) is None
    few = run_of(rank(loaders=(loader(num_workers=4),), workers=(workers(cpu_wait_s=500.0),)), compute=100.0)
    assert cpu_oversubscribed(gather(few)) is None


def test_training_threads_that_queue_are_too_many_without_any_worker() -> None:
    def threads(number: int, cpu_wait_s: float | None, **readings: Any) -> Run:
        made = rank(torch_threads=number, cpu_wait_s=cpu_wait_s, loaders=(loader(wait_s=1.0),))
        run = run_of(made, on=machine(2.0), data_wait=1.0, compute=99.0)
        return replace(run, samples=sampled(host_reading=host(**readings))) if readings else run

    finding = found(cpu_oversubscribed(gather(threads(16, 50.0))))
    assert finding.evidence[0] == "16 training threads queue for 2 CPUs"
    assert finding.fix == "Give the training 2 threads: torch.set_num_threads(2), or OMP_NUM_THREADS=2."
    assert finding.predicted_speedup == (1.0, 2.0)
    assert answer(threads(16, 50.0)).verdict.code == "cpu_oversubscribed"
    for healthy in (
        threads(2, 50.0),  # one for each CPU
        threads(16, 2.0),  # they hardly queue
        threads(16, 50.0, cpu_pct=99.0, tree_cpu_pct=40.0),  # behind other processes
    ):
        assert cpu_oversubscribed(gather(healthy)) is None
    unknown = cpu_oversubscribed(gather(threads(16, None)))
    assert unknown == Abstention("cpu_oversubscribed", "how long the training thread waited for a CPU")


def test_workers_that_use_little_cpu_cannot_slow_the_computing() -> None:
    idle = workers(fetch_s=10.0, fetch_cpu_s=4.0, process_cpu_s=4.0, cpu_wait_s=6.0)
    feeding = loader(num_workers=8, prefetch_factor=2, wait_s=1.0, wait_cpu_s=0.5)
    run = run_of(
        rank(torch_threads=2, workers=(idle,), loaders=(feeding,)), on=machine(2.0), data_wait=1.0, compute=99.0
    )
    assert cpu_oversubscribed(gather(run)) is None


def test_workers_that_sleep_are_not_too_many_because_they_queue_for_the_little_they_compute() -> None:
    sleeping = crowd(fetch_cpu_s=5.0, process_cpu_s=6.0, cpu_wait_s=20.0)
    assert cpu_oversubscribed(gather(sleeping)) is None
    assert answer(sleeping).verdict.code == "input_io_bound"


def test_a_crowd_whose_queueing_is_unknown_is_not_judged() -> None:
    judgement = cpu_oversubscribed(gather(crowd(cpu_wait_s=None)))
    assert judgement == Abstention("cpu_oversubscribed", "how long the workers waited for a CPU")


# --------------------------------------------------------------------------- throttled


def test_a_hot_gpu_is_throttled() -> None:
    run = on_gpu(throttle_reasons=("thermal",), sm_clock_mhz=990.0, temperature_c=89.0)
    finding = found(throttled(gather(run)))
    assert finding.share == pytest.approx(100 / 100)
    assert finding.evidence == (
        "GPU 0 was slowed down in 100 % of the readings: thermal",
        "its clock was at 50 % of its maximum",
        "it reached 89 °C",
    )
    assert finding.fix.startswith("Cool the GPU")
    assert finding.predicted_speedup == (1.0, 2.0)
    assert answer(run).verdict.code == "throttled"


def test_a_power_cap_counts_only_when_the_clock_falls() -> None:
    assert throttled(gather(on_gpu(throttle_reasons=("power_cap",)))) is None
    slow = found(throttled(gather(on_gpu(throttle_reasons=("power_cap",), sm_clock_mhz=1200.0))))
    assert slow.fix.startswith("Give the GPU more power")


def test_a_board_that_draws_all_it_was_made_for_runs_at_full_speed() -> None:
    capped = {"throttle_reasons": ("power_cap",), "sm_clock_mhz": 1200.0, "power_limit_w": 700.0}
    assert throttled(gather(on_gpu(**capped, power_default_w=700.0))) is None
    assert throttled(gather(on_gpu(**capped, power_default_w=800.0))) is not None
    hot = {**capped, "throttle_reasons": ("power_cap", "thermal"), "power_default_w": 700.0}
    assert "slowed down in 100 % of the readings: thermal" in found(throttled(gather(on_gpu(**hot)))).evidence[0]


def test_an_idle_or_short_slowdown_is_left_alone_and_an_unread_clock_not_judged() -> None:
    assert throttled(gather(on_gpu(throttle_reasons=("reliability",)))) is None
    spell = sampled(gpu(throttle_reasons=("hw_slowdown",)), seconds=5) + sampled(gpu())[5:]
    assert throttled(gather(run_of(gpu_rank(), samples=spell))) is None
    assert throttled(gather(on_gpu(throttle_reasons=None))) == Abstention(
        "throttled", "the GPU's clock and its reasons for slowing down"
    )


# --------------------------------------------------------------------------- gpu_shared

OURS = GpuProcess(101, "python", 5 * 10**9, ours=True)
THEIRS = GpuProcess(999, "ollama", 20 * 10**9, ours=False)


def test_another_process_on_the_gpu_is_named() -> None:
    finding = found(gpu_shared(gather(on_gpu(processes=(OURS, THEIRS)))))
    assert finding.severity == "warn"
    assert finding.evidence == ("GPU 0 also runs ollama (pid 999, 18.6 GiB)",)
    assert finding.predicted_speedup == (1.0, 2.0)  # two that compute take turns


@pytest.mark.parametrize(("use_pct", "severity", "gain"), [(0.0, "info", None), (96.0, "warn", (1.0, 2.0))])
def test_a_process_that_only_holds_memory_costs_no_time(
    use_pct: float, severity: str, gain: tuple[float, float] | None
) -> None:
    """A notebook that somebody left open: nobody computed there before the job came."""
    alone = gpu(util_pct=use_pct, processes=(THEIRS,))
    starting = tuple(replace(sample, t_s=float(second)) for second, sample in enumerate(sampled(alone, seconds=8)))
    together = sampled(gpu(processes=(OURS, THEIRS)))
    run = run_of(gpu_rank(), samples=(*starting, *together), compute=100.0)
    finding = found(gpu_shared(gather(run)))
    assert (finding.severity, finding.predicted_speedup) == (severity, gain)
    assert finding.evidence[1] == f"before the job used it, that GPU was busy {use_pct:.0f} % of the time"
    assert (answer(run).verdict.code == "gpu_shared") is (gain is not None)


def test_a_gpu_of_ones_own_is_left_alone_and_unseen_processes_not_judged() -> None:
    assert gpu_shared(gather(on_gpu(processes=(OURS,)))) is None
    other = run_of(gpu_rank(), samples=sampled(gpu(), gpu(1, processes=(THEIRS,))))
    assert gpu_shared(gather(other)) is None  # it sits on a GPU that the job does not use
    assert gpu_shared(gather(on_gpu(processes=None))) == Abstention("gpu_shared", "the processes on the GPU")
