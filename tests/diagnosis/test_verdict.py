import typing
from typing import Any

import pytest

from fulltilt.diagnosis import answer, diagnose, low_gpu_warning
from fulltilt.diagnosis.evidence import gather
from fulltilt.diagnosis.findings import ordered
from fulltilt.diagnosis.predicted_gain import expected
from fulltilt.diagnosis.rules import RULES
from fulltilt.diagnosis.verdict import WORDS
from fulltilt.records import (
    Buckets,
    Finding,
    FindingCode,
    HotLine,
    LoaderRecord,
    RankRecord,
    Settings,
    Span,
    ThreadRecord,
)
from tests.diagnosis.examples import gpu, gpu_rank, host, loader, machine, rank, run_of, sampled, spans_of, workers

STOPPED = {"state": "crashed", "exit_code": None, "ended_by": "StoppedEarly"}
KILLED = {"state": "killed", "exit_code": -9}


def finding(code: FindingCode, gain: tuple[float, float] | None, severity: Any = "warn", share: float = 0.2) -> Finding:
    return Finding(code, share, severity, ("fact",), None, "fix", gain)


def test_what_workers_take_from_compute_on_the_same_cpus_is_gained_as_well() -> None:
    """At most 2.3 times as fast was told of a job that became 3.8 times as fast."""
    crowded = rank(loaders=(loader(num_workers=2),), workers=(workers(process_cpu_s=80.0),))
    told = answer(run_of(crowded, on=machine(2.0), data_wait=57.0, compute=43.0))
    assert "; at least 2.3 × as fast without it" in told.verdict.sentence
    on_gpu = answer(run_of(gpu_rank(loaders=crowded.loaders, workers=crowded.workers), data_wait=57.0, compute=43.0))
    assert "; at most 2.3 × as fast without it" in on_gpu.verdict.sentence
    # Taking turns with it on one thread, loading leaves compute nothing but the time.
    serial = rank(loaders=(loader(wait_s=57.0, wait_cpu_s=56.0),), workers=(workers(process_cpu_s=56.0),))
    told = answer(run_of(serial, on=machine(2.0), data_wait=57.0, compute=43.0))
    assert "; at most 2.3 × as fast without it" in told.verdict.sentence


@pytest.mark.parametrize(
    ("trained", "bound"),
    [
        (rank(loaders=(loader(num_workers=2),), workers=(workers(process_cpu_s=10.0),)), "about"),
        (rank(loaders=(loader(num_workers=2),), workers=(workers(process_cpu_s=1.0),)), "at most"),
        (gpu_rank(loaders=(loader(num_workers=2),), workers=(workers(process_cpu_s=80.0),)), "at most"),
        (gpu_rank(threads=(ThreadRecord("read", 40.0),)), "about"),
        (gpu_rank(cpu_wait_s=9.0), "about"),
    ],
)
def test_a_gain_is_no_bound_where_loading_slows_compute(trained: RankRecord, bound: str) -> None:
    """Without what shares its CPUs, or the interpreter lock, compute is faster than it was measured."""
    assert gather(run_of(trained, on=machine(2.0), data_wait=50.0, host_code=10.0, compute=40.0)).bound == bound


def test_an_estimate_is_not_told_as_a_bound() -> None:
    told = answer(run_of(rank(threads=(ThreadRecord("read", 60.0),), off_cpu_s=60.0), compute=100.0))
    assert told.verdict.code == "gil_contended"
    assert "; at best about 2.5 × as fast without it" in told.verdict.sentence


def test_there_is_one_rule_for_each_code_named_like_it() -> None:
    assert tuple(rule.code for rule in RULES) == typing.get_args(FindingCode)


# --------------------------------------------------------------------------- order


def test_findings_stand_in_the_order_of_what_they_would_win() -> None:
    found = [
        finding("host_code", (1.1, 1.2)),
        finding("input_serial", (1.5, 2.5)),
        finding("sync_point", (1.3, 1.6)),
    ]
    assert [f.code for f in ordered(found)] == ["input_serial", "sync_point", "host_code"]


def test_the_healthy_end_stands_behind_causes_and_before_remarks() -> None:
    found = [
        finding("compute_bound", None, "info", 0.9),
        finding("host_code", (1.03, 1.06), "info", 0.06),
        finding("padding_waste", (1.05, 1.12), "warn", 0.11),
        finding("memory_pressure", None, "warn", 0.0),
    ]
    codes = [f.code for f in ordered(found)]
    assert codes == ["padding_waste", "memory_pressure", "compute_bound", "host_code"]


def test_a_job_about_to_die_of_memory_comes_first() -> None:
    found = [finding("input_serial", (2.0, 3.0), "severe"), finding("shm_small", None, "severe", 0.0)]
    assert [f.code for f in ordered(found)] == ["shm_small", "input_serial"]


def test_equal_wins_keep_the_order_of_the_rules() -> None:
    found = [finding("input_serial", (1.2, 1.3)), finding("sync_point", (1.2, 1.3))]
    assert ordered(found) == tuple(found)
    assert ordered(reversed(found)) == tuple(reversed(found))


def test_the_order_goes_by_the_middle_of_the_range() -> None:
    assert expected((1.0, 4.0)) == 2.0
    assert expected(None) == 1.0


# --------------------------------------------------------------------------- sentences


def starved_by_workers() -> tuple[LoaderRecord, ...]:
    return (loader(num_workers=2, wait_s=62.0, wait_cpu_s=1.0),)


@pytest.mark.parametrize(
    ("run", "code", "sentence"),
    [
        (
            run_of(gpu_rank(workers=(workers(),), loaders=starved_by_workers()), data_wait=62.0, compute=38.0),
            "input_cpu_bound",
            "Data loading, CPU-bound: the GPU waits for data 62 % of the time after start-up; at most 2.6 × as "
            "fast without it: "
            "training gets 320 samples/s, the GPU could take 842.",
        ),
        (
            run_of(rank(loaders=(loader(wait_s=62.0, wait_cpu_s=60.0),)), data_wait=62.0, compute=38.0),
            "input_serial",
            "Data loading, no workers: training waits for data 62 % of the time after start-up; at most 2.6 × as "
            "fast without it: "
            "training gets 320 samples/s, compute could take 842.",
        ),
        (  # the rate of the whole run, which stands beside it in every report, is 278
            run_of(rank(loaders=(loader(wait_s=62.0),)), data_wait=62.0, compute=38.0, validation=15.0),
            "input_serial",
            "Data loading, no workers: training waits for data 54 % of the time after start-up; at most 2.2 × as "
            "fast without it: "
            "between validations and saves training gets 320 samples/s, compute could take 842.",
        ),
        (  # validation beside it: the loader gives what it gives, but there is less to gain
            run_of(
                gpu_rank(workers=(workers(),), loaders=starved_by_workers()),
                data_wait=62.0,
                compute=38.0,
                validation=15.0,
            ),
            "input_cpu_bound",
            "Data loading, CPU-bound: the GPU waits for data 54 % of the time after start-up; at most 2.2 × as "
            "fast without it: "
            "between validations and saves training gets 320 samples/s, the GPU could take 842.",
        ),
        (
            run_of(rank(loaders=()), spans=(spans_of(samples=False, data_wait=50.0, compute=50.0),)),
            "input_serial",
            "Data loading, no DataLoader: training waits for data 50 % of the time after start-up; at most 2.0 × as "
            "fast without it.",
        ),
        (
            run_of(rank(loaders=(loader(passes=41),)), epoch_turnover=40.0, compute=60.0),
            "epoch_restart",
            "Epoch restarts: restarting the loader for each epoch takes 40 % of the time after "
            "start-up; up to 1.7 × as fast without it.",
        ),
        (
            run_of(rank(host_lines=(HotLine("train.py:55", "main", 49.0),)), host_code=50.0, compute=50.0),
            "host_code",
            "Python code in the training loop: the script's own code takes 50 % of the time after start-up "
            "(train.py:55); up to 2.0 × as fast without it.",
        ),
        (
            run_of(gpu_rank(gpu_busy_step_s=0.095), samples=sampled(gpu()), compute=95.0, host_code=5.0),
            "compute_bound",
            "Compute-bound: 95 % of the time after start-up is compute; 320 samples/s, 95 % of the compute ceiling.",
        ),
        (
            run_of(rank(), compute=70.0, validation=15.0, host_code=8.0, checkpoint=4.0, epoch_turnover=3.0),
            "compute_bound",
            "Mostly compute: 70 % of the time after start-up, and no single cause takes much of the rest; "
            "320 samples/s, 70 % of the compute ceiling.",
        ),
        (
            run_of(rank(), compute=96.0, host_code=4.0, run={"state": "crashed", "exit_code": 1}),
            "compute_bound",
            "Compute-bound: 96 % of the time after start-up is compute; 320 samples/s, 96 % of the compute ceiling; "
            "the script ended with exit code 1 after 1,000 steps.",
        ),
        (
            run_of(rank(), compute=96.0, host_code=4.0, run={"state": "interrupted", "exit_code": 130}),
            "compute_bound",
            "Compute-bound: 96 % of the time after start-up is compute; 320 samples/s, 96 % of the compute ceiling; "
            "it was interrupted after 1,000 steps.",
        ),
        (
            run_of(rank(), compute=96.0, host_code=4.0, run=STOPPED),
            "compute_bound",
            "Compute-bound: 96 % of the time after start-up is compute; 320 samples/s, 96 % of the compute ceiling; "
            "stopped by StoppedEarly after 1,000 steps.",
        ),
        (
            run_of(rank(finished=False, t1_s=110.0), compute=96.0, host_code=4.0, run=KILLED),
            "compute_bound",
            "Compute-bound: 96 % of the time after start-up is compute; 320 samples/s, 96 % of the compute ceiling; "
            "it was killed by SIGKILL after at least 1,000 steps, and what it did last was not recorded.",
        ),
        (
            run_of(
                rank(finished=False, t1_s=150.0, under_way=Span(110, 150, 0, 0, 0, None, Buckets(data_wait_s=40))),
                compute=96.0,
                host_code=4.0,
                run=KILLED,
            ),
            "compute_bound",
            "Compute-bound: 96 % of the time after start-up is compute; 320 samples/s, 96 % of the compute "
            "ceiling; it was killed by "
            "SIGKILL after at least 1,000 steps; no step in the last 40 s: waiting for data.",
        ),
        (
            run_of(
                rank(finished=False, t1_s=110.9, under_way=Span(110, 110.9, 0, 0, 0, None, Buckets(data_wait_s=0.9))),
                compute=96.0,
                host_code=4.0,
                run=KILLED,
            ),
            "compute_bound",
            "Compute-bound: 96 % of the time after start-up is compute; 320 samples/s, 96 % of the compute ceiling; "
            "it was killed by SIGKILL after at least 1,000 steps, and what it did last was not recorded.",
        ),
        (
            run_of(rank(finished=False, t1_s=110.0), compute=96.0, host_code=4.0, run={**KILLED, "oom_kills": 1}),
            "compute_bound",
            "Compute-bound: 96 % of the time after start-up is compute; 320 samples/s, 96 % of the compute "
            "ceiling; it was killed by the "
            "kernel for lack of memory (SIGKILL) after at least 1,000 steps, and what it did last was not recorded.",
        ),
        (
            run_of(rank(), compute=96.0, host_code=4.0, run={"state": "crashed", "exit_code": 1, "oom_kills": 2}),
            "compute_bound",
            "Compute-bound: 96 % of the time after start-up is compute; 320 samples/s, 96 % of the compute "
            "ceiling; the script ended with "
            "exit code 1 after 1,000 steps, and the kernel killed 2 processes for lack of memory.",
        ),
        (
            run_of(rank(finished=False, t1_s=110.0), compute=96.0, host_code=4.0),
            "compute_bound",
            "Compute-bound: 96 % of the time after start-up is compute; 320 samples/s, 96 % of the compute ceiling; "
            "its end was not recorded.",
        ),
        (
            run_of(rank(), compute=20.0, unattributed=80.0),
            "unexplained",
            "No cause found: unattributed time takes 80 % of the time after start-up.",
        ),
    ],
)
def test_the_verdict_is_one_sentence_people_want_to_read(run: Any, code: str, sentence: str) -> None:
    diagnosis = answer(run)
    assert (diagnosis.verdict.code, diagnosis.verdict.sentence) == (code, sentence)
    if diagnosis.findings:
        assert diagnosis.verdict.code == diagnosis.findings[0].code
        assert diagnosis.verdict.share == diagnosis.findings[0].share
    assert diagnose(run) == diagnosis.findings


def idle(state: str = "done", exit_code: int = 0, **changes: Any) -> Any:
    record = rank(**{"steps": 0, "backwards": 0, "loaders": (), **changes})
    return run_of(record, spans=((spans_of()[0],),), run={"state": state, "exit_code": exit_code})


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        (run_of(), "Nothing was recorded: no process of the job called backward() or an optimizer of torch."),
        (idle("crashed", 1), "The script ended with exit code 1 before its first training step."),
        (idle("killed", -9), "The script was killed by SIGKILL before its first training step."),
        (
            idle(steps=7, backwards=7),  # a run folder that was copied in part
            "7 steps trained, but it is not known when: steps.jsonl is missing or empty.",
        ),
        (idle(backwards=7), "No optimizer step was seen, but backward() ran 7 times."),
        (
            idle(loaders=(loader(batches=12),)),
            "No training was seen: 12 batches came, but no backward() and no optimizer step.",
        ),
        (idle("running"), "Nothing has trained yet: no optimizer step was seen so far."),
        (idle(), "No training was seen: no DataLoader, no backward() and no optimizer step."),
    ],
)
def test_a_job_without_steps_says_what_was_seen(run: Any, sentence: str) -> None:
    verdict = answer(run).verdict
    assert (verdict.code, verdict.share, verdict.sentence) == ("no_steps", 0.0, sentence)


def test_time_that_nobody_saw_is_no_part_of_a_share() -> None:
    """A killed process loses its last second: of a run of two seconds that made half of every share."""
    killed = rank(finished=False, t1_s=110.0)
    run = run_of(killed, host_code=50.0, compute=50.0, run={**KILLED, "wall_s": 210.0})
    assert answer(run).verdict.sentence.startswith(
        "Python code in the training loop: the script's own code takes 50 % of the time"
    )
    assert answer(run).ledger.buckets.unattributed_s == pytest.approx(100.0)


@pytest.mark.parametrize(("steps", "train_s"), [(1, 30.0), (40, 0.4)])
def test_a_run_of_a_moment_is_not_judged(steps: int, train_s: float) -> None:
    diagnosis = answer(run_of(rank(steps=steps), spans=(spans_of(steps, host_code=train_s),)))
    assert diagnosis.verdict.code == "too_short"
    assert diagnosis.verdict.sentence.startswith(f"Too short to tell: {steps} step")
    assert not diagnosis.findings
    assert answer(run_of(rank(), spans=(spans_of(40, host_code=30.0),))).verdict.code == "host_code"


def test_a_short_run_that_died_of_memory_still_says_so() -> None:
    full = sampled(host_reading=host(mem_used_bytes=63 * 10**9))
    run = run_of(rank(steps=1), spans=(spans_of(1, compute=0.2),), samples=full, run=KILLED)
    assert answer(run).verdict.code == "memory_pressure"


# --------------------------------------------------------------------------- settings


def test_the_settings_in_force_and_those_asked_for() -> None:
    spans = (spans_of(batches_per_step=4, compute=100.0),)
    run = run_of(gpu_rank(learning_rate=2e-5), spans=spans, run={"asked": Settings(num_workers=4)})
    settings = dict(answer(run).settings)
    assert settings["num_workers"] == 4
    assert settings["accumulation"] == 4
    assert settings["precision"] == "bfloat16"
    assert settings["tf32"] is False
    assert settings["optimizer"] == "AdamW"
    assert settings["asked.num_workers"] == 4
    assert "asked.batch_size" not in settings
    assert dict(answer(run_of()).settings)["num_workers"] is None


def test_every_finding_code_has_a_title() -> None:
    assert set(typing.get_args(FindingCode)) <= set(WORDS)


# --------------------------------------------------------------------------- while the job runs

STARVED = Buckets(startup_s=5.0, data_wait_s=62.0, compute_s=11.0, host_code_s=27.0)
STARVED_RUN = run_of(gpu_rank(loaders=(loader(wait_s=62.0, wait_cpu_s=60.0),)), data_wait=62.0, compute=38.0)


def test_the_warning_while_a_job_runs_says_what_the_verdict_will_say() -> None:
    first = answer(STARVED_RUN).findings[0]
    low, cause, fix, settings = low_gpu_warning(11.0, STARVED, lambda: STARVED_RUN)
    assert low == "GPU utilization is low (11 %)"
    assert cause == f"- most likely: {first.title}"
    assert fix == f"- it takes 62 % of the time after start-up. {first.fix}"
    assert settings.startswith("- settings in force: batch_size 32, accumulation 1, num_workers 0")


def test_a_busy_gpu_or_a_job_that_has_not_begun_gets_no_warning() -> None:
    assert low_gpu_warning(30.0, STARVED, lambda: STARVED_RUN) == ()
    assert low_gpu_warning(5.0, Buckets(startup_s=20.0), lambda: STARVED_RUN) == ()


def test_without_a_gpu_the_share_of_data_wait_decides() -> None:
    assert low_gpu_warning(None, STARVED, lambda: STARVED_RUN)[0] == "Data loading: no workers"
    assert low_gpu_warning(None, Buckets(data_wait_s=20.0, compute_s=80.0), lambda: STARVED_RUN) == ()
