"""Runs made by hand: a job of 1000 steps whose time is laid out bucket by bucket."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fulltilt.records import (
    Buckets,
    CpuCapacity,
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
    WorkerRecord,
)

STEPS = 1000
BATCH = 32
H200 = "NVIDIA H200"


def machine(cpus: float = 8.0, **changes: Any) -> Machine:
    made = Machine(
        hostname="node-1",
        platform="Linux",
        python="3.12.3",
        torch="2.11.0",
        cuda=None,
        driver=None,
        cpu=CpuCapacity(present=16, affinity=16, quota=cpus, usable=cpus),
        mem_total_bytes=64 * 10**9,
        mem_limit_bytes=None,
        shm_total_bytes=32 * 10**9,
        shm_free_bytes=32 * 10**9,
    )
    return replace(made, **changes)


def loader(**changes: Any) -> LoaderRecord:
    made = LoaderRecord(
        loader_id=1,
        role="train",
        where="train.py:31",
        dataset="Photos",
        dataset_len=STEPS * BATCH,
        iterable=False,
        batch_size=BATCH,
        num_workers=0,
        prefetch_factor=None,
        pin_memory=False,
        persistent_workers=False,
        shuffle=True,
        collate=None,
        start_method=None,
        given=("batch_size", "shuffle"),
        passes=1,
        batches=STEPS,
        samples=STEPS * BATCH,
        batch_bytes=1_000_000,
        batch_kind="tensor",
    )
    return replace(made, **changes)


def workers(**changes: Any) -> WorkerRecord:
    made = WorkerRecord(
        loader_id=1,
        processes=2,
        batches=STEPS,
        fetch_s=160.0,
        fetch_cpu_s=150.0,
        cpu_wait_s=2.0,
        idle_s=6.0,  # five of them went into handing over
        process_cpu_s=155.0,
        read_bytes=None,
        lines=(HotLine("dataset.py:48", "decode", 113.6, "Image.open(path)"), HotLine("dataset.py:52", "crop", 20.0)),
    )
    return replace(made, **changes)


def rank(number: int = 0, **changes: Any) -> RankRecord:
    made = RankRecord(
        rank=number,
        world_size=1,
        pid=100 + number,
        hostname="node-1",
        device="cpu",
        gpu_uuid=None,
        t0_s=1.0,
        t1_s=100.0,
        finished=True,
        steps=STEPS,
        backwards=STEPS,
        optimizers=("AdamW",),
        optimizer_calls=STEPS,
        loaders=(loader(),),
        torch_threads=1,
        launch_s=None,
    )
    return replace(made, **changes)


def gpu_rank(number: int = 0, **changes: Any) -> RankRecord:
    """A rank on its own GPU, in bf16, with a loader that keeps up."""
    common: dict[str, Any] = {
        "device": f"cuda:{number}",
        "gpu_uuid": f"GPU-{number}",
        "launch_s": 0.0,
        "alloc_retries": 0,
        "precision": PrecisionRecord("bfloat16", "float32", False, False),
        "loaders": (loader(num_workers=4, prefetch_factor=2, pin_memory=True, persistent_workers=True),),
    }
    return rank(number, **{**common, **changes})


def gpu(number: int = 0, **changes: Any) -> GpuReading:
    made = GpuReading(
        uuid=f"GPU-{number}",
        index=number,
        name=H200,
        util_pct=97.0,
        vram_used_bytes=100 * 10**9,
        vram_total_bytes=140 * 10**9,
        sm_clock_mhz=1900.0,
        sm_clock_max_mhz=1980.0,
        throttle_reasons=(),
        sm_active_pct=85.0,
        processes=(),
    )
    return replace(made, **changes)


def host(**changes: Any) -> HostReading:
    made = HostReading(cpu_pct=40.0, mem_total_bytes=64 * 10**9, mem_used_bytes=20 * 10**9, swap_in_bytes_per_s=0.0)
    return replace(made, **changes)


def spans_of(steps: int = STEPS, batches_per_step: int = 1, samples: bool = True, **seconds: float) -> tuple[Span, ...]:
    """Ten seconds of start-up and then ``steps`` steps whose buckets are ``seconds`` in all."""
    training = Buckets(**{f"{name}_s": value for name, value in seconds.items()})
    count = steps * batches_per_step
    return (
        Span(0.0, 10.0, 0, 0, 0, None, Buckets(startup_s=10.0)),
        Span(10.0, 10.0 + training.total_s, 0, steps, count, count * BATCH if samples else None, training),
    )


def run_of(
    *ranks: RankRecord,
    spans: tuple[tuple[Span, ...], ...] | None = None,
    samples: tuple[Sample, ...] = (),
    on: Machine | None = None,
    run: dict[str, Any] | None = None,
    **seconds: float,
) -> Run:
    """A run of ``ranks`` that all spend ``seconds`` (or each its own ``spans``)."""
    spans = spans or tuple(spans_of(**(seconds or {"compute": 100.0})) for _ in ranks)
    wall_s = max((span.t1_s for own in spans for span in own), default=0.0)
    record = RunRecord(
        name="train.py",
        command=("train.py",),
        started_at="2026-01-01T00:00:00+00:00",
        machine=on or machine(),
        fulltilt="0.1.0",
        state="done",
        wall_s=wall_s,
        exit_code=0,
    )
    return Run("runs/a", replace(record, **(run or {})), ranks, spans, samples)


def sampled(*readings: GpuReading, host_reading: HostReading | None = None, seconds: int = 100) -> tuple[Sample, ...]:
    """The same readings each second of the training part."""
    return tuple(Sample(10.0 + i, host_reading or host(), readings) for i in range(seconds))
