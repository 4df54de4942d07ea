"""What holds for every run, also for runs that nobody would expect."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fulltilt import store
from fulltilt.diagnosis import answer
from fulltilt.diagnosis.findings import ordered
from fulltilt.records import (
    BUCKETS,
    Buckets,
    CommunicationRecord,
    Diagnosis,
    GpuProcess,
    GpuReading,
    HostReading,
    HotLine,
    LoaderRecord,
    Machine,
    PrecisionRecord,
    RankRecord,
    Run,
    RunRecord,
    Sample,
    Span,
    TransferRecord,
    WorkerRecord,
)
from tests.anything import any_physical
from tests.diagnosis.examples import loader, rank, run_of

DURATIONS = st.floats(0.0, 1000.0)
PERCENT = st.floats(0.0, 100.0)
SHARES = st.floats(0.0, 1.0)
WEIGHTS = st.tuples(*(st.floats(0.0, 0.3) for _ in BUCKETS))
# Made once: building a strategy for a record costs more than drawing from it.
HOSTS = st.builds(
    HostReading,
    mem_total_bytes=st.none() | st.just(64 * 10**9),
    mem_used_bytes=st.none() | st.integers(0, 64 * 10**9),
    swap_in_bytes_per_s=st.none() | st.floats(0.0, 2e6),
)
WORKERS = st.builds(
    WorkerRecord,
    loader_id=st.just(1),
    processes=st.just(2),
    batches=st.integers(0, 2000),
    fetch_s=DURATIONS,
    fetch_cpu_s=DURATIONS,
    cpu_wait_s=st.none() | DURATIONS,
    idle_s=DURATIONS,
    process_cpu_s=DURATIONS,
    read_bytes=st.none() | st.integers(0, 10**12),
    lines=st.just(()) | st.tuples(st.builds(HotLine, st.just("data.py:3"), st.just("load"), DURATIONS)),
)
TRANSFERS = st.none() | any_physical(TransferRecord)
PRECISIONS = st.none() | st.builds(
    PrecisionRecord,
    st.sampled_from((None, "bfloat16")),
    st.sampled_from((None, "float32", "bfloat16")),
    st.sampled_from((None, True, False)),
    st.booleans(),
    st.booleans(),
)
COMMUNICATIONS = st.none() | any_physical(CommunicationRecord)
GPUS = st.builds(
    GpuReading,
    uuid=st.just("GPU-0"),
    index=st.just(0),
    name=st.sampled_from(("NVIDIA H200", "Tesla T4", "Tesla P100-PCIE-16GB")),
    util_pct=st.none() | PERCENT,
    sm_active_pct=st.none() | PERCENT,
    tensor_active_pct=st.none() | PERCENT,
    vram_used_bytes=st.none() | st.integers(0, 80 * 10**9),
    vram_total_bytes=st.none() | st.just(80 * 10**9),
    sm_clock_mhz=st.none() | st.floats(0.0, 2000.0),
    sm_clock_max_mhz=st.none() | st.just(2000.0),
    throttle_reasons=st.sampled_from((None, (), ("thermal",), ("power_cap",))),
    processes=st.sampled_from((None, (), (GpuProcess(9, None, None, ours=False),))),
    lost=st.booleans(),
)
SAMPLES = st.lists(st.builds(Sample, DURATIONS, HOSTS, st.lists(GPUS, max_size=1).map(tuple)), max_size=3).map(tuple)


@st.composite
def tiled_spans(draw: st.DrawFn) -> tuple[Span, ...]:
    """A rank's life: start-up, then spans without a gap whose buckets add up to their length; one of them is large."""
    reached_s = draw(st.floats(0.0, 20.0))
    largest = draw(st.sampled_from(("compute_s", "data_wait_s", *BUCKETS)))
    spans = []
    for steps in draw(st.lists(st.sampled_from((40, 1, 0)), min_size=1, max_size=3)):
        length_s = draw(DURATIONS)
        weights = {**dict(zip(BUCKETS, draw(WEIGHTS), strict=True)), largest: 1.0}
        whole = sum(weights.values())
        parts = Buckets(**{name: length_s * weight / whole for name, weight in weights.items()})
        samples = draw(st.none() | st.integers(1, 4096))
        spans.append(Span(reached_s, reached_s + length_s, 0, steps, steps, samples, parts))
        reached_s += length_s
    return tuple(spans)


@st.composite
def loaders(draw: st.DrawFn) -> LoaderRecord:
    wait_s = draw(DURATIONS)
    return replace(
        loader(),
        role=draw(st.sampled_from(("train", "train", "eval", "unused"))),
        where=draw(st.sampled_from((None, "train.py:31", "transformers/trainer.py:900"))),
        iterable=draw(st.booleans()),
        batch_size=draw(st.none() | st.integers(1, 512)),
        num_workers=draw(st.integers(0, 32)),
        prefetch_factor=draw(st.none() | st.integers(1, 16)),
        pin_memory=draw(st.booleans()),
        persistent_workers=draw(st.booleans()),
        passes=draw(st.integers(0, 50)),
        batches=draw(st.integers(0, 2000)),
        samples=draw(st.none() | st.integers(0, 100_000)),
        batch_bytes=draw(st.none() | st.integers(0, 10**9)),
        batch_kind=draw(st.sampled_from((None, "tensor", "dict of tensor", "tuple of numpy", "list of objects"))),
        wait_s=wait_s,
        wait_cpu_s=wait_s * draw(SHARES),
        restart_s=draw(DURATIONS),
        padding_share=draw(st.none() | SHARES),
    )


@st.composite
def ranks(draw: st.DrawFn, number: int, world_size: int) -> RankRecord:
    on_gpu = draw(st.booleans())
    return replace(
        rank(number),
        world_size=world_size,
        device=f"cuda:{number}" if on_gpu else "cpu",
        gpu_uuid=draw(st.sampled_from((None, f"GPU-{number}"))) if on_gpu else None,
        finished=draw(st.booleans()),
        loaders=tuple(draw(st.lists(loaders(), max_size=2))),
        workers=draw(st.just(()) | st.tuples(WORKERS)),
        transfer=draw(TRANSFERS),
        precision=draw(PRECISIONS),
        communication=draw(COMMUNICATIONS),
        gpu_busy_step_s=draw(st.none() | st.floats(0.0, 1.0)),
        launch_s=draw(st.none() | DURATIONS),
        sync_lines=draw(st.sampled_from(((), (HotLine("train.py:4", "main", 2.0, "loss.item()"),)))),
        syncs=draw(st.sampled_from((0, 40))),
        alloc_retries=draw(st.none() | st.integers(0, 9)),
        torch_threads=draw(st.none() | st.integers(1, 64)),
    )


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Runs as a recorder could write them."""
    world_size = draw(st.sampled_from((1, 1, 2)))
    present = draw(st.sampled_from((world_size, world_size, world_size, 1, 0)))
    cpus = draw(st.sampled_from((0.5, 1.0, 2.0, 16.0)))
    base = run_of()
    record = replace(
        base.run,
        machine=replace(base.run.machine, cpu=replace(base.run.machine.cpu, usable=cpus)),
        state=draw(st.sampled_from(("running", "done", "crashed", "interrupted", "killed"))),
        exit_code=draw(st.none() | st.integers(-15, 255)),
        wall_s=draw(st.none() | st.floats(0.0, 10_000.0)),
    )
    return Run(
        "runs/any",
        record,
        tuple(draw(ranks(number, world_size)) for number in range(present)),
        tuple(draw(tiled_spans()) for _ in range(present)),
        draw(SAMPLES),
    )


# Runs that can be read from a folder, whatever stands in it: overlapping spans, impossible figures.
ODD_RANKS = st.tuples(any_physical(RankRecord), st.lists(any_physical(Span), max_size=3).map(tuple))
ODD_RUNS = st.builds(
    lambda record, ranks, samples: Run(
        "runs/odd", record, tuple(rank for rank, _ in ranks), tuple(spans for _, spans in ranks), samples
    ),
    any_physical(RunRecord),
    st.lists(ODD_RANKS, max_size=2),
    st.lists(any_physical(Sample), max_size=1).map(tuple),
)


def check(diagnosis: Diagnosis) -> None:
    """What every answer keeps to."""
    buckets = diagnosis.ledger.buckets
    assert all(getattr(buckets, name) >= 0 for name in BUCKETS)
    assert buckets.total_s == pytest.approx(diagnosis.ledger.wall_s, abs=1e-6, rel=1e-9)
    assert 0 <= diagnosis.verdict.share <= 1
    assert diagnosis.verdict.sentence.endswith(".")
    for finding in diagnosis.findings:
        assert 0 <= finding.share <= 1
        assert finding.fix
        assert finding.evidence
        if finding.predicted_speedup is not None:
            low, high = finding.predicted_speedup
            assert 1.0 <= low <= high < math.inf
    codes = [judged.code for judged in (*diagnosis.findings, *diagnosis.abstained)]
    assert len(codes) == len(set(codes))
    assert ordered(diagnosis.findings) == diagnosis.findings
    assert len(diagnosis.checklist) == 5
    for rank_summary in diagnosis.ranks:
        assert 0 <= rank_summary.waits_s <= rank_summary.buckets.communication_s + 1e-6


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(runs())
def test_every_run_gets_an_answer_that_closes(run: Run) -> None:
    diagnosis = answer(run)
    check(diagnosis)
    assert answer(run) == diagnosis


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ODD_RUNS)
def test_even_an_odd_run_gets_one(run: Run) -> None:
    diagnosis = answer(run)
    assert diagnosis.ledger.buckets.total_s == pytest.approx(diagnosis.ledger.wall_s, abs=1e-6, rel=1e-6)
    store.encode(diagnosis, fully=True)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(runs(), st.randoms())
def test_the_order_of_findings_does_not_depend_on_the_order_of_rules(run: Run, random: Any) -> None:
    findings = list(answer(run).findings)
    shuffled = findings.copy()
    random.shuffle(shuffled)
    place = [(f.severity, f.predicted_speedup, f.share) for f in ordered(shuffled)]
    assert place == [(f.severity, f.predicted_speedup, f.share) for f in findings]


def test_a_machine_without_anything_is_a_valid_machine() -> None:
    bare = replace(run_of().run.machine, shm_total_bytes=None, mem_total_bytes=None)
    assert isinstance(bare, Machine)
    check(answer(run_of(rank(), on=bare)))
