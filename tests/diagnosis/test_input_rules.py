from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fulltilt.diagnosis import answer
from fulltilt.diagnosis.evidence import Evidence, gather
from fulltilt.diagnosis.findings import Judgement
from fulltilt.diagnosis.loader_bottleneck import Bottleneck
from fulltilt.diagnosis.rules.data_loading import (
    input_cpu_bound,
    input_io_bound,
    input_serial,
    slow_storage,
)
from fulltilt.diagnosis.rules.worker_count import plan_workers
from fulltilt.diagnosis.rules.worker_overhead import dataset_pickled, epoch_restart, input_handover, shm_small
from fulltilt.records import (
    Abstention,
    Buckets,
    Finding,
    HotLine,
    LiveMove,
    LiveRecord,
    Run,
    Settings,
    Span,
    StorageReading,
)
from tests.diagnosis.examples import (
    BATCH,
    STEPS,
    gpu_rank,
    host,
    loader,
    machine,
    rank,
    run_of,
    sampled,
    spans_of,
    workers,
)

INPUT_RULES = (input_serial, input_cpu_bound, input_io_bound, input_handover)


def found(judgement: object) -> Finding:
    assert isinstance(judgement, Finding)
    return judgement


def serial(cpus: float = 8.0, wait_s: float = 62.0, cpu_s: float = 60.0, **changes: object) -> Run:
    rest_s = 100.0 - wait_s
    return run_of(
        rank(loaders=(loader(wait_s=wait_s, wait_cpu_s=cpu_s, **changes),)),
        on=machine(cpus),
        data_wait=wait_s,
        compute=rest_s,
    )


def computes_on_two_cpus(wait_s: float) -> Run:
    """A CPU job of 100 s that loads and computes in turns."""
    waiting = loader(wait_s=wait_s, wait_cpu_s=wait_s)
    made = rank(torch_threads=2, loaders=(waiting,))
    return run_of(made, on=machine(2.0), data_wait=wait_s, compute=100.0 - wait_s)


def fed(worker_record: object = None, *, cpus: float = 8.0, wait_s: float = 62.0, **changes: object) -> Run:
    """A GPU job that waits 62 % of its time for the workers of its loader."""
    settings = {"num_workers": 2, "prefetch_factor": 2, "wait_s": wait_s, "wait_cpu_s": 1.0, **changes}
    records = (worker_record,) if worker_record else ()
    return run_of(
        gpu_rank(workers=records, loaders=(loader(**settings),)),
        on=machine(cpus),
        data_wait=wait_s,
        compute=100.0 - wait_s,
    )


IO_WORKERS = {"fetch_cpu_s": 10.0, "process_cpu_s": 12.0, "cpu_wait_s": 1.0}


@pytest.mark.parametrize(
    ("library", "words"),
    [("torchdata", "ParallelMapper("), ("datasets", "DataLoader(dataset, "), ("webdataset", "webdataset.WebLoader(")],
)
def test_what_a_library_brings_without_a_loader_gets_its_words(library: str, words: str) -> None:
    finding = found(input_serial(gather(serial(made_by=library, given=(), iterable=True, dataset="IterableDataset"))))
    assert finding.fix.startswith("Make the next batches while this one trains at train.py:31: ")
    assert words in finding.fix
    assert "get_worker_info" not in finding.fix


def test_workers_are_no_cure_for_a_slow_sampler() -> None:
    """It runs in the training thread whatever the workers: the advice was to set num_workers, for 13 ×, or to 0."""
    idle = workers(fetch_s=20.0, fetch_cpu_s=19.0, process_cpu_s=60.0, idle_s=120.0)
    for own, where in (("torch/utils/data/sampler.py:277", "train.py:31"), ("train.py:12", "train.py:12")):
        lines = (HotLine(own, "Weighted.__iter__", 46.5),)
        for run in (serial(sampler_lines=lines), fed(idle, sampler_lines=lines)):
            (finding,) = (found(judged) for rule in INPUT_RULES if (judged := rule(gather(run))) is not None)
            assert finding.title == "Data loading: slow sampler"  # with two workers it was titled "no workers"
            assert finding.evidence[1].startswith("75 % of it is the sampler")
            assert "num_workers=" not in finding.fix
            assert ("num_samples" in finding.fix) == own.startswith("torch/")
            assert (finding.code, finding.where, finding.predicted_speedup) == ("input_serial", where, (1.3, 1.87))
    lines = (HotLine("train.py:12", "Weighted.__iter__", 15.0),)
    assert "num_workers=" in found(input_serial(gather(serial(sampler_lines=lines)))).fix
    assert input_serial(gather(fed(idle, sampler_lines=lines))) is None


def test_workers_that_idle_while_the_sampler_runs_do_not_hand_over_slowly() -> None:
    idle = workers(fetch_s=20.0, fetch_cpu_s=19.0, process_cpu_s=21.0, idle_s=170.0)
    lines = (HotLine("train.py:12", "Weighted.__iter__", 25.0),)  # 40 % of the wait
    evidence = gather(fed(idle, sampler_lines=lines, wait_cpu_s=31.0))
    assert evidence.supply is not None
    assert evidence.supply.handover_main_share == pytest.approx(6 / 62)  # 50 %, less the sampler's
    assert input_handover(evidence) is None
    finding = found(input_serial(evidence))
    assert (finding.title, finding.where) == ("Data loading: slow sampler", "train.py:12")
    assert finding.predicted_speedup == (1.14, 1.33)


@pytest.mark.parametrize(
    ("call", "waits"),
    [
        ("with LOCK", True),
        ("self.lock.acquire()", False),
        ("fcntl.flock(file, LOCK_EX)", False),
        ("with FileLock(p)", False),
    ],
)
def test_workers_are_no_cure_for_a_lock_that_they_share(call: str, waits: bool) -> None:
    """Four workers and eight gave the same rate; the advice was to raise them, for 1.5 to 2.2 times."""

    def judged(line: HotLine) -> Finding:
        return found(input_io_bound(gather(fed(workers(**IO_WORKERS, fetch_s=100.0, lines=(line,))))))

    line = HotLine("train.py:8", "D.__getitem__", 60.0, call, waits)
    finding = judged(line)
    assert finding.fix.startswith(f"{call} at train.py:8 lets one process at a time through, so more")
    assert "num_workers=" not in finding.fix
    assert finding.where == "train.py:8"
    assert finding.predicted_speedup == (1.43, 2.5)
    assert "num_workers=" in judged(replace(line, seconds=20.0)).fix  # seldom
    assert "num_workers=" in judged(replace(line, call="read(block)")).fix  # a wait, but for no lock


@pytest.mark.parametrize(
    ("run", "code"),
    [
        (serial(), "input_serial"),
        (fed(workers()), "input_cpu_bound"),
        (fed(workers(**IO_WORKERS)), "input_io_bound"),
        (fed(workers(fetch_s=20.0, fetch_cpu_s=19.0, process_cpu_s=60.0, idle_s=120.0)), "input_handover"),
    ],
)
def test_exactly_one_cause_is_named(run: Run, code: str) -> None:
    judgements = [rule(gather(run)) for rule in INPUT_RULES]
    assert [judgement.code for judgement in judgements if isinstance(judgement, Finding)] == [code]
    assert not [judgement for judgement in judgements if isinstance(judgement, Abstention)]


@pytest.mark.parametrize("rule", INPUT_RULES)
def test_an_input_that_keeps_up_is_left_alone(rule: object) -> None:
    assert callable(rule)
    assert rule(gather(serial(wait_s=4.0))) is None
    assert rule(gather(fed(workers(), wait_s=4.0))) is None


@pytest.mark.parametrize("rule", [input_cpu_bound, input_io_bound, input_handover])
def test_unmeasured_workers_are_not_judged(rule: object) -> None:
    assert callable(rule)
    judgement = rule(gather(fed(None)))
    assert isinstance(judgement, Abstention)
    assert judgement.lacks == "the workers' own CPU time and waiting time"


# --------------------------------------------------------------------------- input_serial


def test_serial_loading_says_how_many_workers_its_cost_needs() -> None:
    finding = found(input_serial(gather(serial())))
    assert finding.share == pytest.approx(62 / 100)
    assert finding.severity == "severe"
    assert finding.where == "train.py:31"
    assert finding.evidence[0] == "waiting for data takes 62 % of the time after start-up: 1 min 02 s, 62 ms a step"
    assert "a batch takes 62 ms, 97 % on the CPU" in finding.evidence[1]
    assert finding.fix.startswith(
        "Set num_workers=2 at train.py:31: DataLoader(..., num_workers=2, persistent_workers=True)"
        " (random augmentations, if any, differ; later epochs are shuffled differently)."
    )
    assert "2 workers would hide the wait; the job may use 8 CPUs, enough for 7 such workers" in finding.fix
    # Two workers at the serial rate: 2 × 516.1 / 320 = 3.23, more than the wait itself allows: 1 / 0.38.
    # At the cautious end two workers give 0.6 of that, and each pass begins with an empty queue.
    assert finding.predicted_speedup == (1.78, 2.63)


def test_serial_loading_on_few_cpus_promises_only_what_they_can_carry() -> None:
    finding = found(input_serial(gather(serial(cpus=2.0, wait_s=90.0, cpu_s=90.0))))
    # Both CPUs full: 2 / (0.9 + 0.1) of the time that one takes now.
    assert finding.predicted_speedup == (1.22, 2.16)
    assert "num_workers=2" in finding.fix
    assert "for the rest, make fetching cheaper" in finding.fix


def test_workers_by_the_hundred_are_no_advice() -> None:
    fix = found(input_serial(gather(serial(cpus=2.0, wait_s=99.9, cpu_s=1.0)))).fix
    assert "num_workers=8 at train.py:31" in fix
    assert "there may be more of them than CPUs" in fix


def test_serial_loading_that_only_waits_may_have_more_workers_than_cpus() -> None:
    asked = serial(cpus=2.0, wait_s=90.0, cpu_s=1.0)
    finding = found(input_serial(gather(asked)))
    assert "num_workers=8" in finding.fix  # 4 for each CPU at most
    assert "Such workers wait and take hardly any CPU, so there may be more of them than CPUs" in finding.fix
    assert "1.1 % on the CPU; fetching mostly waits" in finding.evidence[1]
    assert finding.predicted_speedup == (1.0, 9.6)
    assert "do not help if fetching waits for something that comes no sooner" in finding.fix
    assert "comes no sooner" not in found(input_serial(gather(serial(cpu_s=55.0)))).fix


def test_a_generator_that_waits_promises_nothing_for_sure() -> None:
    lines = (HotLine("gen.py:12", "make", 40.0, "pipe.read(256)"),)
    made = rank(loaders=(), host_lines=lines, off_cpu_s=38.0)
    finding = found(input_serial(gather(run_of(made, data_wait=40.0, compute=60.0))))
    assert finding.predicted_speedup == (1.0, 1.67)
    assert "do not help if fetching waits" in finding.fix


def test_waiting_workers_that_read_no_storage_promise_nothing_for_sure() -> None:
    finding = found(input_io_bound(gather(fed(workers(**IO_WORKERS, read_bytes=0)))))
    assert "do not help if fetching waits" in finding.fix
    assert finding.predicted_speedup is not None
    assert finding.predicted_speedup[0] == 1.0
    stored = found(input_io_bound(gather(fed(workers(**IO_WORKERS, read_bytes=10**10)))))
    assert stored.predicted_speedup is not None
    assert stored.predicted_speedup[0] > 1.0


def test_serial_loading_that_has_no_cpu_is_not_taken_for_waiting() -> None:
    run = serial(cpus=2.0, wait_s=90.0, cpu_s=30.0)
    crowded = replace(run, ranks=(replace(run.ranks[0], cpu_wait_s=60.0),))
    crowded = replace(crowded, samples=sampled(host_reading=host(cpu_pct=99.0, tree_cpu_pct=40.0)))
    finding = found(input_serial(gather(crowded)))
    assert any("33 % on the CPU, 60 % waiting for a CPU" in fact for fact in finding.evidence)
    assert any("other processes had 80 % of the CPUs" in fact for fact in finding.evidence)
    assert "Other processes on the machine take the CPUs" in finding.fix
    assert finding.predicted_speedup is not None
    assert finding.predicted_speedup[0] == 1.0


def test_more_workers_promise_nothing_for_certain_where_others_take_the_cpus() -> None:
    """Beside other jobs the second worker won 1.31 ×, and was told to win 1.47 to 1.67 ×."""
    alone = found(input_cpu_bound(gather(fed(workers(), cpus=4.0)))).predicted_speedup
    run = fed(workers(), cpus=4.0)
    busy = replace(run, samples=sampled(host_reading=host(cpu_pct=99.0, tree_cpu_pct=40.0)))
    crowded = found(input_cpu_bound(gather(busy)))
    assert "Other processes on the machine take the CPUs" in crowded.fix
    assert alone is not None
    assert alone[0] > 1.0
    assert crowded.predicted_speedup == (1.0, alone[1])


def test_what_a_library_does_for_each_sample_stands_beside_its_line() -> None:
    line = HotLine("data.py:9", "D.__getitem__", 55.0, "self.x[i]", inside="h5py/_hl/dataset.py:Dataset.__getitem__")
    told = (
        "self.x[i] at data.py:9 reads HDF5, which decompresses all chunks that a read touches, where it is compressed"
    )
    lines = (line, HotLine("data.py:12", "D.__getitem__", 7.0))
    one = workers(fetch_s=62.0, lines=lines, processes=0)
    run = serial()
    run = replace(run, ranks=(replace(run.ranks[0], workers=(one,)),))
    fix = found(input_serial(gather(run))).fix
    assert told in fix
    assert f"{told}: read as many rows at a time as a chunk has, " in fix
    for cpus in (8.0, 1.0):  # more workers are advised, or a cheaper fetch
        assert told in found(input_cpu_bound(gather(fed(workers(lines=(line,)), cpus=cpus)))).fix
    assert "That alone" not in fix  # with so many CPUs workers win as much
    few = serial(cpus=1.0)
    narrow = found(input_serial(gather(replace(few, ranks=(replace(few.ranks[0], workers=(one,)),)))))
    assert narrow.predicted_speedup is not None
    assert narrow.predicted_speedup[1] < 2.2
    assert "for the rest, make D.__getitem__ (data.py:9) cheaper" in narrow.fix
    assert narrow.fix.endswith(" That alone: up to 2.2 × as fast.")
    seldom = workers(lines=(replace(line, seconds=20.0),))
    assert "HDF5" not in found(input_cpu_bound(gather(fed(seldom)))).fix


def test_a_costly_library_counts_with_all_lines_that_call_it() -> None:
    """Rows of a pandas table, taken apart on four lines: 2.5 × were told, 4.8 × were won."""
    series = "pandas/core/series.py:Series.__getitem__"
    row = HotLine("data.py:9", "D.__getitem__", 40.0, "row[columns]", inside=series)
    others = (replace(row, where="data.py:10", seconds=10.0), HotLine("data.py:12", "D.__getitem__", 5.0))
    for lines, most in (((row, *others), 2.29), ((row, others[1]), 2.23)):
        run = serial(cpus=1.0)
        run = replace(run, ranks=(replace(run.ranks[0], workers=(workers(fetch_s=62.0, lines=lines, processes=0),)),))
        finding = found(input_serial(gather(run)))
        assert finding.fix.startswith("row[columns] at data.py:9 takes a row out of a pandas table")
        assert finding.predicted_speedup == (1.0, most)


def test_a_call_that_a_few_lines_make_cheaper_comes_before_workers() -> None:
    line = HotLine("data.py:9", "D.__getitem__", 57.0, "zipfile.ZipFile(PATH)", inside="zipfile.py:ZipFile.__init__")
    rest = HotLine("data.py:10", "D.__getitem__", 5.0)
    run = serial(cpus=2.0)
    run = replace(
        run, ranks=(replace(run.ranks[0], workers=(workers(fetch_s=62.0, lines=(line, rest), processes=0),)),)
    )
    finding = found(input_serial(gather(run)))
    assert finding.fix.startswith("zipfile.ZipFile(PATH) at data.py:9 opens a file and reads its index anew ")
    assert "and keep it. Set num_workers=" in finding.fix
    plain = found(input_serial(gather(serial(cpus=2.0)))).predicted_speedup
    assert plain is not None
    assert finding.predicted_speedup == (plain[0], 2.33)  # 57 of 100 s less
    for cpus in (8.0, 1.0):
        finding = found(input_cpu_bound(gather(fed(workers(lines=(replace(line, seconds=140.0),)), cpus=cpus))))
        assert finding.fix.startswith("zipfile.ZipFile(PATH) at data.py:9 opens")


def test_cpus_that_the_job_fills_leave_a_first_worker_nothing_to_win() -> None:
    run = computes_on_two_cpus(20.0)
    for used_pct, predicted in ((None, (1.02, 1.25)), (180.0, (1.0, 1.2)), (100.0, (1.02, 1.25))):
        busy = replace(run, samples=sampled(host_reading=host(tree_cpu_pct=used_pct)))
        finding = found(input_serial(gather(busy)))
        assert finding.predicted_speedup == predicted
        assert ("he job keeps 1.8 of its 2 CPUs busy already" in finding.fix) == (used_pct == 180.0)


def test_a_compute_heavy_cpu_job_leaves_the_loader_little() -> None:
    run = computes_on_two_cpus(50.0)
    finding = found(input_serial(gather(run)))
    # If one CPU computes, loading takes half of the time away: 2. If worker and training slow each other down, and the
    # rates are off, less is left of it than of both CPUs computing, (1 + 2) / 2 of the time instead of 2: 1.33.
    assert finding.predicted_speedup == (1.1, 2.0)


def test_an_iterable_data_set_must_split_its_work() -> None:
    assert "get_worker_info" in found(input_serial(gather(serial(iterable=True)))).fix


@pytest.mark.parametrize(
    "run",
    [serial(), fed(workers(**IO_WORKERS)), fed(workers(fetch_s=20.0, fetch_cpu_s=1.0, idle_s=120.0))],
    ids=["serial", "workers", "one of two workers"],
)
@pytest.mark.parametrize(("state", "in_vain_s"), [("killed", 600.0), ("interrupted", 600.0), ("killed", 30.0)])
def test_a_fetch_that_hung_is_no_matter_of_workers(run: Run, state: Any, in_vain_s: float) -> None:
    """ "1516 workers would hide it" was said of a fetch that never returned."""
    end_s = run.spans[0][-1].t1_s
    hung = Span(end_s, end_s + in_vain_s, 1000, 0, 0, None, Buckets(data_wait_s=in_vain_s))
    (drawn,) = run.ranks[0].loaders
    run = replace(
        run,
        run=replace(run.run, state=state, wall_s=end_s + in_vain_s),
        ranks=(replace(run.ranks[0], loaders=(replace(drawn, wait_s=drawn.wait_s + in_vain_s),)),),
        spans=((*run.spans[0], hung),),
    )
    (finding,) = (found(judged) for rule in INPUT_RULES if isinstance(judged := rule(gather(run)), Finding))
    assert ("More workers would wait as well." in finding.fix) == (in_vain_s == 600.0)
    assert ("num_workers=" in finding.fix) <= (in_vain_s != 600.0)
    assert ("10 min of it is one wait that never ended" in finding.evidence) == (in_vain_s == 600.0)


def test_batches_that_are_made_elsewhere_name_the_line_that_waits() -> None:
    """A queue's get() was the script's own code, to be left to a second thread."""
    lines = (HotLine("train.py:9", "main", 60.0, "ready.get()", waits=True),)
    finding = found(input_serial(gather(run_of(rank(loaders=(), host_lines=lines), data_wait=60.0, compute=40.0))))
    assert finding.where == "train.py:9"
    assert finding.fix.startswith("ready.get() at train.py:9 waits for batches: ")
    assert finding.predicted_speedup == (1.43, 2.5)


def test_experience_is_not_to_be_made_in_a_data_set() -> None:
    """The environment of a collector was: with the weights that the worker started with."""
    made = rank(loaders=(), host_lines=(HotLine("env.py:12", "Cartpole._step", 60.0, "simulate(state)"),))
    finding = found(input_serial(gather(run_of(made, on=machine(4.0), data_wait=40.0, compute=60.0))))
    assert finding.fix.startswith("simulate(state) at env.py:12: the environment is slow: step several at once")
    assert "IterableDataset" not in finding.fix
    assert finding.predicted_speedup == (1.0, pytest.approx(1 / 0.7, abs=0.01))


def test_batches_made_by_a_generator_name_its_line() -> None:
    made = rank(loaders=(), host_lines=(HotLine("gen.py:12", "make", 60.0, "rng.normal(size)"),))
    finding = found(input_serial(gather(run_of(made, data_wait=40.0, compute=60.0))))
    assert finding.where == "gen.py:12"
    assert "no DataLoader was seen" in finding.evidence[1]
    assert "put the code at gen.py:12 into" in finding.fix
    assert "num_workers=1" in finding.fix
    assert "Unless they are random, the batches stay the same" in finding.fix
    assert finding.predicted_speedup == (1.33, 1.67)
    iterated = replace(made, drawn_from=HotLine("train.py:30", "batches", 60.0, "batches(250)"))
    finding = found(input_serial(gather(run_of(iterated, data_wait=40.0, compute=60.0))))
    assert finding.evidence[1].endswith("makes each batch itself, in batches(250) at train.py:30")
    assert "put batches(250) at train.py:30 into a torch.utils.data.IterableDataset" in finding.fix
    assert "gen.py:12" in finding.evidence[2], "the line inside it that takes the time"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_generator_behind_the_loader_is_blamed_and_not_the_loader(num_workers: int) -> None:
    """A generator that cut crops out of what it drew was told to give its quick loader a worker."""
    made = rank(
        loaders=(loader(where="gen.py:8", num_workers=num_workers, wait_s=5.0, wait_cpu_s=5.0),),
        workers=(workers(fetch_s=5.0, fetch_cpu_s=5.0, process_cpu_s=5.0, idle_s=150.0),) if num_workers else (),
        host_lines=(HotLine("gen.py:11", "batches", 35.0, "crop(row)"),),
        drawn_from=HotLine("gen.py:20", "batches", 35.0, "batches(loader)"),
    )
    evidence = gather(run_of(made, data_wait=40.0, compute=60.0))
    assert (
        gather(run_of(replace(made, drawn_from=None), data_wait=40.0, compute=60.0)).bottleneck
        is not Bottleneck.AFTER_LOADER
    )
    finding = found(input_serial(evidence))
    assert finding.where == "gen.py:11"
    assert "88 % of it is the script's own generator, after the loader at gen.py:8" in finding.evidence[1]
    assert "collate_fn" in finding.fix
    assert [rule(evidence) for rule in INPUT_RULES[1:]] == [None] * 3


def test_a_loader_that_another_thread_draws_from_is_not_cleared() -> None:
    made = rank(loaders=(loader(wait_s=0.0),), host_lines=(HotLine("train.py:9", "take", 35.0, "queue.get()"),))
    assert gather(run_of(made, data_wait=40.0, compute=60.0)).bottleneck is Bottleneck.SERIAL


def test_a_loader_that_another_thread_draws_from_is_promised_no_more_than_its_workers_can_do() -> None:
    """One worker in place of the script's own thread was promised 1.9 to 19 times the speed."""
    made = rank(loaders=(loader(wait_s=0.0),), host_lines=(HotLine("train.py:9", "take", 95.0, "get()", waits=True),))
    finding = found(input_serial(gather(run_of(made, on=machine(2.0), data_wait=95.0, compute=5.0))))
    assert finding.fix.startswith("Set num_workers=2 at train.py:31")
    assert finding.predicted_speedup is not None
    low, high = finding.predicted_speedup
    assert low == 1.0
    assert 2.0 <= high < 2.5
    assert "train.py:9" in finding.evidence[2]


def test_one_of_several_loaders_is_not_measured_by_the_rate_of_the_job() -> None:
    """A slow loader of the last stage was promised 1.00 × with 8 workers: the first stage had set the rate."""
    stages = (loader(where="train.py:9"), loader(loader_id=2, wait_s=62.0, batches=50, samples=50 * BATCH))
    finding = found(input_serial(gather(run_of(rank(loaders=stages), data_wait=62.0, compute=38.0))))
    assert finding.where == "train.py:31"
    assert finding.predicted_speedup == (1.0, 2.63)
    assert finding.fix.startswith("Set num_workers=32 at train.py:31"), "it sleeps: four for each of 8 CPUs"
    assert "would hide it" not in finding.fix


def test_the_first_worker_of_one_of_several_loaders_still_takes_as_long_for_a_batch() -> None:
    """Two zipped loaders on two CPUs: one worker was to make the job 4.1 times as fast, and made it slower."""
    loaders = (loader(where="train.py:9"), loader(loader_id=2, wait_s=76.0, wait_cpu_s=75.0))
    made = rank(loaders=loaders)
    finding = found(input_serial(gather(run_of(made, on=machine(2.0), data_wait=76.0, compute=24.0))))
    assert finding.predicted_speedup == (1.0, pytest.approx(1 / 0.76, abs=0.01))


def test_a_batch_that_is_made_faster_than_handed_over_needs_no_worker() -> None:
    """A worker was advised where a batch takes 1.2 ms: the job took a fifth longer with it."""
    quick = {"wait_s": 1.1, "wait_cpu_s": 1.1, "batches": 1000, "samples": 1000 * BATCH}
    run = run_of(rank(loaders=(loader(**quick),)), on=machine(2.0), data_wait=1.1, compute=8.9)
    finding = found(input_serial(gather(run)))
    assert finding.fix.startswith("Make fetching cheaper at train.py:31: a batch takes 1.1 ms, and handing one over")


def test_fetching_on_threads_of_its_own_computes() -> None:
    """Reading zarr was told as waiting, with more workers than CPUs."""
    assert gather(serial(cpu_s=6.0)).supply.waits  # type: ignore[union-attr]
    evidence = gather(serial(cpu_s=6.0, helpers_cpu_s=70.0))
    assert evidence.supply is not None
    assert not evidence.supply.waits
    assert evidence.supply.busy_share == 1.0  # two threads at once
    assert "100 % on the CPU" in found(input_serial(evidence)).evidence[1]


def test_the_first_batch_is_not_what_a_batch_costs_without_workers() -> None:
    plain, imported = gather(serial()).supply, gather(serial(first_wait_s=30.0, batches=STEPS + 1)).supply
    assert plain is not None
    assert imported is not None
    assert imported.batch_s == pytest.approx(plain.batch_s)


def test_one_worker_for_batches_without_a_count_promises_no_more_than_overlap() -> None:
    """Packed meshes, 80 % of the time: a worker was told to win 4.9 ×."""
    finding = found(input_serial(gather(serial(cpus=2.0, wait_s=80.0, cpu_s=79.0, samples=None))))
    assert "num_workers=1" in finding.fix
    assert finding.predicted_speedup == (1.25, 1.25)


def test_the_workers_of_one_of_several_loaders_are_planned_from_its_own_rate() -> None:
    """With eight samples of the others for one of its own, 164 workers were said to hide what 19 would."""
    slow = loader(num_workers=2, wait_s=62.0, batch_size=BATCH // 8, samples=STEPS * BATCH // 8)
    made = rank(loaders=(slow, loader(loader_id=2, num_workers=2)), workers=(workers(),))
    several = plan_workers(gather(run_of(made, data_wait=62.0, compute=38.0)))
    made = rank(loaders=(loader(num_workers=2),), workers=(workers(),))
    alone = plan_workers(gather(run_of(made, data_wait=62.0, compute=38.0)))
    assert several is not None
    assert alone is not None
    assert several.needed == pytest.approx(alone.needed, abs=1)


def test_an_iterable_that_the_script_has_measured_is_no_data_loader() -> None:
    finding = found(input_serial(gather(serial(made_by="script", iterable=True, batch_size=None))))
    assert "no DataLoader was seen" in finding.evidence[1]
    assert "IterableDataset" in finding.fix
    assert "DataLoader(...," not in finding.fix


def test_a_loader_built_by_hugging_face_is_changed_through_its_arguments() -> None:
    fix = found(input_serial(gather(serial(where="run_glue.py:510", made_by="transformers")))).fix
    assert "TrainingArguments(..., dataloader_num_workers=2, dataloader_persistent_workers=True)" in fix


# --------------------------------------------------------------------------- workers at their limit


def test_busy_workers_are_raised_to_what_is_needed() -> None:
    finding = found(input_cpu_bound(gather(fed(workers()))))
    assert finding.where == "dataset.py:48"
    assert "2 workers at 165 ms a batch, 95 % computing, idle 0.6 % of their time" in finding.evidence
    assert "of the workers' fetching, 71 % in decode, dataset.py:48 (Image.open(path))" in finding.evidence
    assert finding.fix.startswith(
        "Raise num_workers 2 → 5 at train.py:31: "
        "DataLoader(..., num_workers=5, persistent_workers=True, pin_memory=True)"
        " (later epochs are shuffled differently)."
    )
    assert finding.predicted_speedup == (1.75, 2.63)


def test_time_in_which_workers_wait_for_a_cpu_is_not_told_as_computing() -> None:
    finding = found(input_cpu_bound(gather(fed(workers(fetch_cpu_s=110.0, cpu_wait_s=45.0)))))
    assert any("computing or waiting for a CPU" in fact for fact in finding.evidence)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"iterable": True}, True),
        ({"iterable": True, "num_workers": 1}, False),
        ({"iterable": True, "dataset": "WebDataset"}, False),
        ({}, False),
    ],
)
def test_workers_of_a_stream_are_to_skip_before_they_decode(changes: dict[str, object], told: bool) -> None:
    """Each of two workers decoded every record and kept its half."""
    fix = found(input_cpu_bound(gather(fed(workers(), cpus=2.0, **changes)))).fix
    assert ("skips the samples of other workers (get_worker_info()) before it reads" in fix) is told


def test_busy_workers_that_fill_the_cpus_need_a_cheaper_line() -> None:
    finding = found(input_cpu_bound(gather(fed(workers(), cpus=2.0))))
    assert finding.fix.startswith("Make decode (dataset.py:48) cheaper: 2 workers and the training fill the CPUs")
    # The line takes 71 % of a fetch: half of it gone is 1.55 ×; all of it is more than the wait allows.
    assert finding.predicted_speedup == (1.55, 2.63)


def test_workers_that_queue_for_a_cpu_are_busy_not_waiting() -> None:
    queueing = workers(fetch_cpu_s=50.0, process_cpu_s=52.0, cpu_wait_s=60.0)
    assert gather(fed(queueing, cpus=3.0)).bottleneck is Bottleneck.CPU


def test_waiting_workers_are_raised_beyond_the_cpus_and_the_data_staged() -> None:
    run = fed(workers(**IO_WORKERS, read_bytes=5_000_000_000), cpus=2.0)
    finding = found(input_io_bound(gather(run)))
    assert "2 workers at 162 ms a batch, 93 % waiting, not computing, idle 2.4 % of their time" in finding.evidence
    assert "the workers read 4.7 GiB from storage, 47.7 MiB/s" in finding.evidence
    assert "num_workers 2 → 5" in finding.fix
    idle_disk = found(input_io_bound(gather(fed(workers(**IO_WORKERS, read_bytes=4096)))))
    assert "the workers read only 4 KiB from storage: they wait for a lock, a sleep or a service" in idle_disk.evidence
    far = StorageReading("/data", "fuse.gcsfuse", kind="network")
    finding = found(input_io_bound(gather(fed(workers(**IO_WORKERS, read_bytes=4096, data=far)))))
    assert "the workers read only 4 KiB from storage: they wait for the network file system" in finding.evidence
    assert "the files in /data are on a network file system (fuse.gcsfuse)" in finding.evidence
    assert finding.fix.endswith("Or copy /data to a disk of this machine before the job.")


def test_little_cpu_time_on_a_crowded_machine_without_queue_times_proves_nothing() -> None:
    dark = workers(**{**IO_WORKERS, "cpu_wait_s": None})
    judgement = input_io_bound(gather(fed(dark, cpus=1.0)))
    assert judgement == Abstention("input_io_bound", "how long the workers waited for a CPU")
    assert found(input_io_bound(gather(fed(dark, cpus=8.0)))).code == "input_io_bound"


def test_much_cpu_time_proves_a_busy_worker_even_without_queue_times() -> None:
    assert gather(fed(workers(cpu_wait_s=None), cpus=1.0)).bottleneck is Bottleneck.CPU


# --------------------------------------------------------------------------- input_handover


def test_numpy_batches_should_become_tensors() -> None:
    slow = fed(
        workers(fetch_s=20.0, fetch_cpu_s=19.0, process_cpu_s=60.0, idle_s=120.0),
        wait_cpu_s=40.0,
        batch_kind="numpy",
        batch_bytes=19_000_000,
        collate="stack_arrays",
    )
    finding = found(input_handover(gather(slow)))
    assert "2 workers could give 1,049 samples/s; idle 56 % of their time" in finding.evidence
    assert "a batch has 18.1 MiB (numpy)" in finding.evidence
    assert finding.fix.startswith("Let stack_arrays at train.py:31 return tensors")
    assert finding.predicted_speedup == (1.45, 2.63)


def test_a_training_thread_that_rebuilds_batches_is_handover_even_if_workers_are_busy() -> None:
    finding = found(input_handover(gather(fed(workers(), wait_cpu_s=50.0, collate="default_collate"))))
    assert finding.fix.startswith("Send fewer and smaller tensors at train.py:31: only the fields")


def test_batches_that_are_quick_to_fetch_need_no_workers() -> None:
    quick = workers(fetch_s=3.0, fetch_cpu_s=1.0, process_cpu_s=4.0, cpu_wait_s=1.0, idle_s=190.0)
    finding = found(input_handover(gather(fed(quick, pin_memory=True))))
    assert finding.fix == (
        "Fetch without workers: DataLoader(..., num_workers=0) at train.py:31; "
        "fetching a batch takes 2 ms, waiting for a worker's 62 ms."
    )


def on_cpu(run: Run) -> Run:
    return replace(run, ranks=tuple(replace(one, device="cpu", gpu_uuid=None) for one in run.ranks))


# Workers that hand over many tensors and take most of the two CPUs that compute needs.
TAKES_CPUS = {"fetch_s": 3.0, "fetch_cpu_s": 1.0, "process_cpu_s": 120.0, "cpu_wait_s": 1.0, "idle_s": 190.0}


def test_without_workers_that_take_its_cpus_compute_has_no_known_ceiling() -> None:
    """1.7 to 4.9 × as fast was promised where it became 37 × as fast."""
    run, plenty = (on_cpu(fed(workers(**{**TAKES_CPUS, "process_cpu_s": cpu_s}), cpus=2.0)) for cpu_s in (120.0, 4.0))
    # A batch takes 2 ms to fetch and the training 100 ms a step; half of the wait at the cautious end.
    assert found(input_handover(gather(run))).predicted_speedup == (1.45, 50.0)
    assert "at least 2.6 × as fast without it" in answer(run).verdict.sentence
    assert "compute could take at least 842" in answer(run).verdict.sentence
    assert found(input_handover(gather(plenty))).predicted_speedup == (1.45, 2.63)


def test_a_list_that_default_collate_makes_into_many_tensors_is_named() -> None:
    for tensors, collate, told in ((151, "default_collate", True), (151, "own", False), (2, "default_collate", False)):
        many = fed(workers(**TAKES_CPUS), cpus=2.0, collate=collate, batch_tensors=tensors)
        finding = found(input_handover(gather(many)))
        assert f"a batch has 976.6 KiB (tensor, in {tensors} tensors)" in finding.evidence
        assert finding.fix.startswith("default_collate makes 151 tensors of a batch at train.py:31") == told
        assert "Fetch without workers" in finding.fix


def test_idle_workers_without_a_cost_mean_uneven_batches() -> None:
    uneven = workers(fetch_s=60.0, fetch_cpu_s=55.0, process_cpu_s=56.0, idle_s=100.0)
    finding = found(input_handover(gather(fed(uneven))))
    assert finding.fix == (
        "Some batches take long, and since batches come in order, the workers then wait for them. "
        "Raise prefetch_factor 2 → 4 at train.py:31: DataLoader(..., prefetch_factor=4, pin_memory=True). "
        "Or take batches as soon as they are ready, in an order that differs each time: in_order=False."
    )
    # Workers that rest 62 % of the time can give 2.6 × as much at the very most; a static share of slow batches, none.
    assert finding.predicted_speedup == (1.0, 2.62)


def test_what_evens_out_uneven_batches_is_not_advised_twice() -> None:
    uneven = workers(fetch_s=60.0, fetch_cpu_s=55.0, process_cpu_s=56.0, idle_s=100.0)
    unordered = found(input_handover(gather(fed(uneven, given=("in_order",))))).fix
    assert "in_order=" not in unordered
    assert "prefetch_factor 2 → 4" in unordered
    deep = found(input_handover(gather(fed(uneven, prefetch_factor=8)))).fix
    assert "in_order=False" in deep
    assert "prefetch_factor" not in deep
    both = found(input_handover(gather(fed(uneven, given=("in_order",), prefetch_factor=8)))).fix
    assert both.endswith("Or make the slowest samples cheaper.")


def test_workers_that_rest_during_validation_are_not_idle() -> None:
    resting = workers(fetch_s=100.0, fetch_cpu_s=98.0, process_cpu_s=99.0, idle_s=101.0)
    feeding = loader(num_workers=2, wait_s=30.0, wait_cpu_s=1.0)
    run = run_of(gpu_rank(workers=(resting,), loaders=(feeding,)), data_wait=30.0, validation=50.0, compute=20.0)
    assert gather(run).bottleneck is Bottleneck.CPU
    unpaused = run_of(gpu_rank(workers=(resting,), loaders=(feeding,)), data_wait=30.0, compute=70.0)
    assert gather(unpaused).bottleneck is Bottleneck.HANDOVER


def test_workers_that_end_with_their_pass_were_idle_in_no_validation_behind_it() -> None:
    """Workers that rested half of their lives were called idle 0 % of their time: they had not lived to see it."""
    short_lived = workers(fetch_s=50.0, fetch_cpu_s=5.0, process_cpu_s=6.0, idle_s=50.0)
    feeding = loader(num_workers=2, wait_s=10.0, wait_cpu_s=1.0)
    run = run_of(gpu_rank(workers=(short_lived,), loaders=(feeding,)), data_wait=10.0, validation=50.0, compute=40.0)
    supply = gather(run).supply
    assert supply is not None
    assert supply.idle_share == pytest.approx(0.49, abs=0.01)


def test_workers_that_rest_until_the_first_step_are_not_idle() -> None:
    """``itertools.cycle(loader)`` starts the workers; model and optimizer came later, and they were called idle."""
    early = workers(fetch_s=180.0, fetch_cpu_s=5.0, process_cpu_s=5.0, idle_s=40.0)  # two that live for 110 s each
    supply = gather(fed(early)).supply
    assert supply is not None
    assert supply.idle_share == pytest.approx(0.1)


def test_workers_that_rest_while_the_script_draws_its_curves_are_not_idle() -> None:
    """Workers that slept in every fetch were called idle and their batches uneven: an epoch ended in 40 s of plots."""
    resting = workers(fetch_s=116.0, fetch_cpu_s=10.0, process_cpu_s=11.0, idle_s=84.0)
    feeding = loader(num_workers=2, wait_s=30.0, wait_cpu_s=1.0)
    steps = [
        Span(10.0 + 6 * at, 16.0 + 6 * at, 100 * at, 100, 100, 100 * BATCH, Buckets(data_wait_s=3.0, compute_s=3.0))
        for at in range(10)
    ]
    plots = Span(70.0, 110.0, 1000, 1, 1, BATCH, Buckets(host_code_s=40.0))
    begun = Span(0.0, 10.0, 0, 0, 0, None, Buckets(startup_s=10.0))
    run = run_of(gpu_rank(workers=(resting,), loaders=(feeding,)), spans=((begun, *steps, plots),))
    assert gather(run).bottleneck is Bottleneck.IO


def test_workers_that_stood_by_while_others_were_on_trial_do_not_make_idle_workers() -> None:
    """Under --auto, a loader whose workers slept in every fetch was told that its batches come late from idle ones."""
    some_stood_by = workers(fetch_s=196.0, idle_s=120.0, **IO_WORKERS)
    feeding = loader(num_workers=2, wait_s=62.0, wait_cpu_s=1.0)
    kept = LiveMove(Settings(num_workers=2), 5.0, "kept", batches_per_s=10.0)
    tuned = LiveRecord(
        *(feeding.loader_id, "settled", "", Settings(num_workers=1), Settings(num_workers=2)),
        batches_per_s=10.0,
        moves=(kept,),
    )

    def bottleneck(*live: LiveRecord) -> Bottleneck:
        observed = gpu_rank(workers=(some_stood_by,), loaders=(feeding,), live=live)
        return gather(run_of(observed, data_wait=62.0, compute=38.0)).bottleneck

    assert bottleneck() is Bottleneck.HANDOVER
    assert bottleneck(tuned) is Bottleneck.IO
    assert bottleneck(replace(tuned, loader_id=feeding.loader_id + 1)) is Bottleneck.HANDOVER


# --------------------------------------------------------------------------- epoch_restart


def test_a_library_that_cannot_keep_its_workers_is_not_told_to() -> None:
    passing = loader(num_workers=2, passes=10, restart_s=40.0, made_by="fastai")
    finding = found(epoch_restart(gather(run_of(rank(loaders=(passing,)), epoch_turnover=40.0, compute=60.0))))
    assert finding.fix.startswith("fastai has no setting that keeps workers between passes. Make fewer, longer")


def test_respawned_workers_should_persist() -> None:
    passing = loader(num_workers=2, passes=41, restart_s=40.0)
    finding = found(epoch_restart(gather(run_of(rank(loaders=(passing,)), epoch_turnover=40.0, compute=60.0))))
    assert finding.share == pytest.approx(40 / 100)
    assert finding.evidence[1] == "41 passes, 1 s for each new one"
    assert finding.fix == (
        "Keep the workers alive at train.py:31: DataLoader(..., persistent_workers=True)"
        " (later epochs are shuffled differently)."
    )
    assert finding.predicted_speedup == (1.25, 1.67)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loader_made_for_each_pass_should_be_made_once(persistent: bool) -> None:
    passing = loader(num_workers=2, passes=41, constructed=41, restart_s=40.0, persistent_workers=persistent)
    finding = found(epoch_restart(gather(run_of(rank(loaders=(passing,)), epoch_turnover=40.0, compute=60.0))))
    assert finding.evidence[2] == "its 2 workers are started anew for each pass (the DataLoader is made 41 times)"
    assert finding.fix == (
        "Keep the workers alive at train.py:31: DataLoader(..., persistent_workers=True), "
        "made once before the loop over epochs (later epochs are shuffled differently)."
    )


def test_the_first_workers_of_a_loader_made_for_each_pass_need_one_that_stays() -> None:
    once = found(input_serial(gather(serial(passes=10))))
    anew = found(input_serial(gather(serial(passes=10, constructed=10))))
    assert "made once before the loop over epochs" not in once.fix
    assert "persistent_workers=True), made once before the loop over epochs" in anew.fix


def test_a_loader_for_each_fold_is_not_a_loader_for_each_pass() -> None:
    passing = loader(num_workers=2, passes=40, constructed=4, restart_s=40.0)
    finding = found(epoch_restart(gather(run_of(rank(loaders=(passing,)), epoch_turnover=40.0, compute=60.0))))
    assert finding.fix.endswith("persistent_workers=True) (later epochs are shuffled differently).")


def streamed(first_fetch_s: float, **changes: Any) -> Any:
    """A rank that streams 11 passes, which restart for 40 s; its first batches took so long, all of them 60 s."""
    passing = loader(num_workers=1, passes=11, restart_s=40.0, iterable=True, dataset="Stream", **changes)
    did = workers(fetch_s=60.0, first_batches=11, first_fetch_s=first_fetch_s, batches=111, cpu_wait_s=0.0)
    return run_of(rank(loaders=(passing,), workers=(did,)), epoch_turnover=40.0, compute=60.0)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_shuffle_buffer_filled_in_each_pass_is_no_start_of_workers(persistent: bool) -> None:
    """persistent_workers=True was told to win 1.25 to 1.67 ×; it won 1.04 ×."""
    finding = found(epoch_restart(gather(streamed(44.0, persistent_workers=persistent))))
    assert finding.title == "Data loading: slow first batch of each pass"
    assert finding.evidence[2].startswith("of it, 3.84 s a pass is Stream making its first batch")
    assert finding.fix.startswith("Let Stream give its first sample of a pass sooner at train.py:31: ")
    assert ("persistent_workers=True saves none of it" in finding.fix) == (not persistent)
    assert finding.predicted_speedup == (1.0, 1.62)


def test_workers_that_start_slowly_for_a_stream_should_persist() -> None:
    finding = found(epoch_restart(gather(streamed(6.0))))
    assert finding.fix.startswith("Keep the workers alive at train.py:31")
    stays = found(epoch_restart(gather(streamed(6.0, persistent_workers=True))))
    assert "let Stream go through the data several times" in stays.fix  # a stream takes no sampler


def test_what_a_worker_does_once_is_not_what_a_batch_costs() -> None:
    """A worker imported librosa in its first fetch: more workers were told to win nothing."""
    imports, resamples = HotLine("data.py:3", "D.__getitem__", 70.0), HotLine("data.py:4", "D.__getitem__", 60.0)
    later = {"fetch_s": 150.0, "fetch_cpu_s": 140.0, "process_cpu_s": 150.0, "cpu_wait_s": 2.0, "idle_s": 6.0}
    began = {"first_batches": 1, "first_fetch_s": 80.0, "first_fetch_cpu_s": 70.0, "first_cpu_wait_s": 1.0}
    all_s = {**later, "fetch_s": 230.0, "fetch_cpu_s": 210.0, "process_cpu_s": 220.0, "cpu_wait_s": 3.0}
    steady = gather(fed(workers(lines=(resamples,), batches=STEPS - 1, **later)))
    imported = workers(lines=(imports, resamples), first_lines=(replace(imports, seconds=69.5),), **all_s, **began)
    evidence = gather(fed(imported))
    assert evidence.supply == steady.supply
    assert found(input_cpu_bound(evidence)).where == "data.py:4"
    assert gather(fed(imported, iterable=True)).supply != steady.supply  # it may have filled a shuffle buffer
    even = replace(imported, first_fetch_s=0.3)
    assert gather(fed(even)).workers == even


def test_passes_without_workers_should_be_longer() -> None:
    run = run_of(rank(loaders=(loader(passes=11, restart_s=10.0),)), epoch_turnover=10.0, compute=90.0)
    finding = found(epoch_restart(gather(run)))
    assert finding.severity == "warn"
    assert "num_samples=k * len(dataset)" in finding.fix


def test_a_quick_turnover_is_left_alone_and_an_unseen_loader_not_judged() -> None:
    assert epoch_restart(gather(run_of(rank(), epoch_turnover=4.0, compute=96.0))) is None
    once = loader(passes=1, num_workers=4)  # its workers end with it; the advice was to keep them alive
    assert epoch_restart(gather(run_of(rank(loaders=(once,)), epoch_turnover=20.0, compute=80.0))) is None
    judgement = epoch_restart(gather(run_of(rank(loaders=()), epoch_turnover=20.0, compute=80.0)))
    assert judgement == Abstention("epoch_restart", "the DataLoader that is restarted")


# --------------------------------------------------------------------------- shm_small


def shared(total: int | None, **changes: object) -> Run:
    settings = {"num_workers": 4, "prefetch_factor": 2, "batch_bytes": 100_000_000, **changes}
    return run_of(rank(loaders=(loader(**settings),)), on=machine(shm_total_bytes=total))


def test_batches_beyond_shared_memory_are_fatal() -> None:
    finding = found(shm_small(gather(shared(64_000_000, num_workers=1))))
    assert finding.severity == "severe"
    assert finding.predicted_speedup is None
    assert finding.evidence == (
        "1 worker × 2 batches ahead × 95.4 MiB = 190.7 MiB in shared memory",
        "/dev/shm has 61 MiB",
    )
    assert "--shm-size=1g" in finding.fix


def test_batches_near_shared_memory_are_a_warning_with_settings_that_fit() -> None:
    finding = found(shm_small(gather(shared(1_000_000_000))))
    assert finding.severity == "warn"
    assert finding.fix.endswith("or lower prefetch_factor 2 → 1 at train.py:31.")


def test_ranks_on_one_machine_share_its_shared_memory() -> None:
    settings = loader(num_workers=4, prefetch_factor=2, batch_bytes=100_000_000)
    ranks = [rank(n, world_size=2, loaders=(settings,)) for n in range(2)]
    finding = found(shm_small(gather(run_of(*ranks, on=machine(shm_total_bytes=2_000_000_000)))))
    assert "4 workers × 2 batches ahead × 2 ranks × 95.4 MiB = 1.5 GiB in shared memory" in finding.evidence


def test_shared_memory_with_room_or_unused_is_left_alone() -> None:
    assert shm_small(gather(shared(32_000_000_000))) is None
    assert shm_small(gather(shared(64_000_000, num_workers=0))) is None
    assert shm_small(gather(shared(64_000_000, batch_kind="numpy"))) is None


def test_unknown_sizes_of_batches_or_shared_memory_are_not_judged() -> None:
    assert shm_small(gather(shared(None))) == Abstention("shm_small", "the size of /dev/shm")
    assert shm_small(gather(shared(64_000_000, batch_bytes=None))) == Abstention("shm_small", "the size of a batch")


def test_nothing_is_judged_without_steps() -> None:
    from fulltilt.diagnosis import answer

    idle = run_of(rank(loaders=()), spans=((spans_of()[0],),))
    lacking = {abstention.code: abstention.lacks for abstention in answer(idle).abstained}
    for rule in (*INPUT_RULES, epoch_restart):
        assert lacking[rule.__name__] == "a training step"


@pytest.mark.parametrize("other", ["validation", "checkpoint"])
@pytest.mark.parametrize(
    ("rule", "change"),
    [
        (input_serial, {"loaders": (loader(wait_s=62.0, wait_cpu_s=6.0),)}),
        (
            input_io_bound,
            {
                "loaders": (loader(num_workers=2, prefetch_factor=2, wait_s=62.0, wait_cpu_s=1.0),),
                "workers": (workers(**IO_WORKERS),),
            },
        ),
    ],
)
def test_what_the_workers_must_give_does_not_depend_on_time_without_training(
    rule: Callable[[Evidence], Judgement], change: dict[str, Any], other: str
) -> None:
    plain = found(rule(gather(run_of(gpu_rank(**change), data_wait=62.0, compute=38.0))))
    beside = found(rule(gather(run_of(gpu_rank(**change), data_wait=62.0, compute=38.0, **{other: 60.0}))))
    assert beside.fix == plain.fix
    # What training no longer waits for is at most 62 of 160 s.
    assert plain.predicted_speedup is not None
    assert beside.predicted_speedup is not None
    assert beside.predicted_speedup[1] <= 160 / 98 < plain.predicted_speedup[1]


# --------------------------------------------------------------------------- storage


def test_many_small_reads_from_storage_are_packed_into_large_files() -> None:
    run = fed(workers(**IO_WORKERS, read_bytes=2_000_000_000, reads=100_000))
    finding = found(slow_storage(gather(run)))
    assert "1,000 reads a second, 19.5 KiB each from storage, 19.1 MiB/s" in finding.evidence
    assert "WebDataset" in finding.fix
    assert finding.where == "dataset.py:48"
    assert [one.code for one in answer(run).findings[:2]] == ["input_io_bound", "slow_storage"]


def test_large_reads_or_files_in_memory_are_no_matter_of_small_files() -> None:
    large = workers(**IO_WORKERS, read_bytes=20_000_000_000, reads=20_000)
    in_memory = workers(**IO_WORKERS, read_bytes=100_000, reads=100_000)
    for crew in (large, in_memory, workers(**IO_WORKERS)):
        assert slow_storage(gather(fed(crew))) is None


def test_a_first_pass_over_cold_files_is_told_apart_from_warm_ones() -> None:
    """One pass of 100 steps waits 0.3 s each, two more wait 0.01 s."""
    spans = [Span(0.0, 10.0, 0, 0, 0, None, Buckets(startup_s=10.0))]
    for step in range(300):
        buckets = Buckets(data_wait_s=0.3 if step < 100 else 0.01, compute_s=0.1)
        t0_s = spans[-1].t1_s
        spans.append(Span(t0_s, t0_s + buckets.total_s, step, 1, 1, BATCH, buckets, epoch=step // 100))
    crew = workers(read_bytes=9_000_000_000, reads=9000, read_bytes_by_pass=(8_900_000_000, 100_000_000, 0))
    run = run_of(gpu_rank(workers=(crew,), loaders=(loader(num_workers=2, passes=3),)), spans=(tuple(spans),))
    finding = found(slow_storage(gather(run)))
    assert finding.evidence[0].startswith("in the first pass the workers read 8.3 GiB from storage, in a later one at")
    assert "300 ms a step for data in the first pass, 10 ms later" in finding.evidence[1]
    assert finding.fix.startswith("Only the first pass is slow.")


# --------------------------------------------------------------------------- pickling


def test_a_large_data_set_pickled_at_each_pass_is_told_with_its_size() -> None:
    spawned = loader(num_workers=2, start_method="spawn", passes=5, pickled_workers=10, pickled_bytes=200_000_000)
    run = run_of(rank(loaders=(replace(spawned, pickle_s=20.0),)), epoch_turnover=30.0, compute=70.0)
    finding = found(dataset_pickled(gather(run)))
    assert finding.share == pytest.approx(0.16)
    assert finding.evidence[0].startswith(
        "190.7 MiB are pickled for each of 2 workers (spawn): 4 s at each of 5 starts"
    )
    assert "persistent_workers=True" in finding.fix


def test_small_arguments_forked_workers_and_one_quick_start_pickle_nothing_of_note() -> None:
    small = loader(num_workers=2, pickled_workers=10, pickled_bytes=20_000, pickle_s=20.0)
    once = loader(num_workers=2, pickled_workers=2, pickled_bytes=200_000_000, pickle_s=2.0)
    for one in (small, once, loader(num_workers=2)):
        assert dataset_pickled(gather(run_of(rank(loaders=(one,)), epoch_turnover=30.0, compute=70.0))) is None
