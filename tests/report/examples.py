"""Runs as the recorder would have written them, with the answers that diagnosis would give.

Built from records alone, so that the reports are tested without torch, a GPU or the rooms below them.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fulltilt import store
from fulltilt.diagnosis.verdict import title_of
from fulltilt.records import (
    Abstention,
    Buckets,
    Ceilings,
    CheckLine,
    CommunicationRecord,
    CompileRecord,
    CpuCapacity,
    DeepRecord,
    Diagnosis,
    Finding,
    GpuReading,
    GpuStep,
    GpuSummary,
    HostReading,
    HotLine,
    KernelRecord,
    Ledger,
    LoaderRecord,
    Machine,
    Phases,
    PrecisionRecord,
    RankRecord,
    RankSummary,
    Run,
    RunRecord,
    Sample,
    Span,
    Throughput,
    TransferRecord,
    Verdict,
    WorkerRecord,
)

GIB = 1 << 30
GPU_NAME = "NVIDIA GeForce RTX 4090"
GPU_UUID = "GPU-3f5b0c52-6a1e-7c7e-9a50-0f6f3c1d2e10"
Reported = tuple[Run, Diagnosis]


class Tape:
    """Spans laid end to end, with a little noise that is the same each time."""

    def __init__(self, seed: int = 0) -> None:
        self.spans: list[Span] = []
        self.now_s = 0.0
        self._random = random.Random(seed)
        self._step = 0

    def outside(self, *, epoch: int = 0, **buckets: float) -> None:
        """Time outside steps: start-up, validation, a checkpoint."""
        self._add(Buckets(**buckets), epoch=epoch, steps=0, samples=None, phases=None)

    def steps(
        self,
        count: int,
        *,
        batch: int,
        epoch: int,
        load_s: float,
        transfer_s: float = 0.0,
        forward_s: float,
        backward_s: float,
        optimizer_s: float,
        other_s: float = 0.0,
        gpu: bool,
        communication_s: float = 0.0,
        fold: int = 1,
    ) -> None:
        """``count`` steps in spans of ``fold``. On a GPU, compute is what the GPU did after the batch arrived."""
        for _ in range(count // fold):
            wobble = self._random.gauss(1.0, 0.06) + (0.9 if self._random.random() < 0.015 else 0.0)
            load = max(load_s * wobble, 0.0) * fold
            parts = [p * fold for p in (transfer_s, forward_s, backward_s, optimizer_s, other_s, communication_s)]
            transfer, forward, backward, optimizer, other, communication = parts
            busy = forward + backward + optimizer
            idle = load + transfer + other
            self._add(
                Buckets(
                    data_wait_s=load,
                    transfer_s=transfer,
                    compute_s=busy,
                    host_code_s=other,
                    communication_s=communication,
                    unattributed_s=0.0004 * fold,
                ),
                epoch=epoch,
                steps=fold,
                samples=batch * fold,
                phases=Phases(
                    load_s=load,
                    transfer_s=transfer,
                    forward_s=forward,
                    backward_s=backward,
                    optimizer_s=optimizer,
                    other_s=other + communication,
                    gpu_busy_s=busy if gpu else None,
                    gpu_idle_s=idle if gpu else None,
                ),
            )

    def _add(
        self,
        buckets: Buckets,
        *,
        epoch: int,
        steps: int,
        samples: int | None,
        phases: Phases | None,
    ) -> None:
        end_s = self.now_s + buckets.total_s
        span = Span(
            t0_s=self.now_s,
            t1_s=end_s,
            first_step=self._step,
            steps=steps,
            batches=steps,
            samples=samples,
            buckets=buckets,
            epoch=epoch,
            phases=phases,
        )
        self.spans.append(span)
        self.now_s = end_s
        self._step += steps


def found(*args: Any) -> Finding:
    finding = Finding(*args)
    return replace(finding, share_after_startup=finding.share, title=title_of(finding))


def machine(*, gpu: bool = True) -> Machine:
    return Machine(
        hostname="trainbox",
        platform="Linux-6.8.0-x86_64",
        python="3.12.4",
        torch="2.11.0",
        cuda="12.9" if gpu else None,
        driver="575.57.08" if gpu else None,
        cpu=CpuCapacity(present=16, affinity=16, quota=8.0, usable=8.0),
        mem_total_bytes=64 * GIB,
        mem_limit_bytes=48 * GIB,
        shm_total_bytes=16 * GIB,
        shm_free_bytes=15 * GIB,
        gpus=(GpuReading(GPU_UUID, 0, GPU_NAME, vram_total_bytes=24 * GIB, power_limit_w=450.0),) if gpu else (),
        driver_cuda="12.9" if gpu else None,
        why_no_gpu=None if gpu else "no NVIDIA driver is loaded",
    )


def samples_over(
    wall_s: float, *, util_pct: float | None, cpu_pct: float, gpus: int = 1, every_s: float = 1.0
) -> tuple[Sample, ...]:
    """Readings at an interval. ``util_pct`` None means that there is no GPU."""
    noise = random.Random(7)

    def wobble(middle: float, width: float, top: float = 100.0) -> float:
        return min(max(noise.gauss(middle, width), 0.0), top)

    def gpu(index: int, warm: bool) -> GpuReading:
        assert util_pct is not None
        uuid = f"{GPU_UUID[:-1]}{index}"
        return GpuReading(
            uuid,
            index,
            GPU_NAME,
            util_pct=wobble(util_pct, 9) if warm else 0.0,
            sm_active_pct=wobble(util_pct * 0.8, 6) if warm else 0.0,
            vram_used_bytes=int((7.4 if warm else 0.6) * GIB),
            vram_total_bytes=24 * GIB,
            power_w=wobble(90 + 3.2 * util_pct, 12, 450) if warm else 42.0,
            power_limit_w=450.0,
            temperature_c=wobble(40 + util_pct * 0.35, 1),
        )

    def host(t_s: float, warm: bool) -> HostReading:
        return HostReading(
            cpu_pct=wobble(cpu_pct / 16 if warm else 2.0, 2),
            tree_cpu_pct=wobble(cpu_pct if warm else 20.0, 6, 800),
            iowait_pct=wobble(1.5, 0.7),
            mem_total_bytes=64 * GIB,
            mem_limit_bytes=48 * GIB,
            mem_used_bytes=int((11 + t_s / wall_s) * GIB),
            tree_pss_bytes=int((4.1 + t_s / wall_s) * GIB),
            disk_read_bytes_per_s=wobble(38e6, 9e6, 1e9),
        )

    moments = [i * every_s for i in range(int(wall_s / every_s) + 1)]
    return tuple(
        Sample(t, host(t, t > 6.0), tuple(gpu(i, t > 6.0) for i in range(gpus)) if util_pct is not None else ())
        for t in moments
    )


def loader(num_workers: int, *, batches: int, batch: int, wait_s: float, wait_cpu_s: float = 0.0) -> LoaderRecord:
    return LoaderRecord(
        loader_id=0,
        role="train",
        where="train.py:31",
        dataset="PhotoFolder",
        dataset_len=batches * batch,
        iterable=False,
        batch_size=batch,
        num_workers=num_workers,
        prefetch_factor=2 if num_workers else None,
        pin_memory=False,
        persistent_workers=False,
        shuffle=True,
        collate="default_collate",
        start_method="fork" if num_workers else None,
        given=("batch_size", "shuffle", "num_workers"),
        passes=3,
        batches=batches,
        samples=batches * batch,
        batch_bytes=batch * 3 * 224 * 224 * 4,
        batch_kind="list of tensors",
        wait_s=wait_s,
        wait_cpu_s=wait_cpu_s,
        first_wait_s=1.2,
        restart_s=1.6,
    )


def ledger_of(spans: Iterable[Span]) -> Ledger:
    buckets = Buckets()
    for span in spans:
        buckets = buckets.plus(span.buckets)
    return Ledger(buckets.total_s, buckets)


def mean_step(spans: Iterable[Span]) -> Phases:
    stepping = [span for span in spans if span.phases is not None]
    steps = sum(span.steps for span in stepping)
    sums = {field.name: [getattr(span.phases, field.name) for span in stepping] for field in dataclasses.fields(Phases)}
    return Phases(**{name: None if None in values else sum(values) / steps for name, values in sums.items()})


def rank(spans: list[Span], number: int = 0, world: int = 1, **fields: object) -> RankRecord:
    steps = sum(span.steps for span in spans)
    record = RankRecord(
        rank=number,
        world_size=world,
        pid=4711 + number,
        hostname="trainbox",
        device=f"cuda:{number}",
        gpu_uuid=GPU_UUID,
        t0_s=0.0,
        t1_s=spans[-1].t1_s if spans else 0.0,
        finished=True,
        steps=steps,
        backwards=steps,
        optimizers=("AdamW",),
        optimizer_calls=steps,
        learning_rate=3e-4,
    )
    return replace(record, **fields)


def starved() -> Reported:
    """A GPU that waits for two workers: 132 samples/s where it could take 412."""
    tape = Tape()
    tape.outside(startup_s=6.4)
    for epoch in range(3):
        tape.steps(
            150,
            batch=64,
            epoch=epoch,
            load_s=0.318,
            transfer_s=0.009,
            forward_s=0.048,
            backward_s=0.093,
            optimizer_s=0.014,
            other_s=0.004,
            gpu=True,
        )
        tape.outside(epoch=epoch, validation_s=4.8)
        tape.outside(epoch=epoch, checkpoint_s=1.1)
        tape.outside(epoch=epoch, epoch_turnover_s=1.6)
    spans = tape.spans
    wall_s = spans[-1].t1_s
    data_wait_s = ledger_of(spans).buckets.data_wait_s
    record = rank(
        spans,
        loaders=(loader(2, batches=450, batch=64, wait_s=data_wait_s),),
        workers=(
            WorkerRecord(
                loader_id=0,
                processes=6,
                batches=450,
                fetch_s=0.94 * 450,
                fetch_cpu_s=0.83 * 450,
                cpu_wait_s=0.02 * 450,
                idle_s=14.0,
                process_cpu_s=0.86 * 450,
                read_bytes=9 * GIB,
                lines=(
                    HotLine("dataset.py:48", "PhotoFolder.__getitem__", 300.3, "image.convert('RGB')"),
                    HotLine("dataset.py:52", "PhotoFolder.__getitem__", 63.4, "self.augment(image)"),
                    HotLine("dataset.py:44", "PhotoFolder.__getitem__", 33.0, "open(path, 'rb')"),
                ),
            ),
        ),
        host_lines=(HotLine("train.py:77", "train", 1.6, "writer.add_scalar('loss', loss)"),),
        checkpoint_lines=(HotLine("train.py:91", "save", 3.3, "torch.save(state, path)"),),
        transfer=TransferRecord(900, 17 * GIB, 1.0, 1.0, "train.py:60"),
        precision=PrecisionRecord("bfloat16", "float32", True, False),
        gpu_busy_step_s=0.155,
        kernels=KernelRecord(9, 0.131, 0.002, 812, 0.9, (HotLine("", "sm90_gemm_bf16", 0.05),)),
        compile=CompileRecord(3, 8.2, 2, (HotLine("net.py:12", "forward", 3.1, "2 times: size mismatch at index 0"),)),
        vram_peak_bytes=7 * GIB,
        torch_threads=8,
    )
    run = RunRecord(
        name="20260114-093012-train",
        command=("train.py", "--epochs", "3", "--batch-size", "64"),
        started_at="2026-01-14T09:30:12+01:00",
        machine=machine(),
        fulltilt="0.1.0",
        state="done",
        wall_s=wall_s,
        exit_code=0,
    )
    ledger = ledger_of(spans)
    share = ledger.buckets.data_wait_s / wall_s
    diagnosis = Diagnosis(
        verdict=Verdict(
            "input_cpu_bound",
            share,
            "The GPU waits for data 58 % of the time: 2 workers decode 132 samples/s and the GPU could take 412, "
            "so there is up to 3.1 × to gain.",
        ),
        ledger=ledger,
        throughput=Throughput(132.1, 2.06, 450, 28800),
        ceilings=Ceilings(412.9, 136.2),
        gpu=(
            GpuSummary(
                GPU_UUID,
                GPU_NAME,
                0,
                util_pct=34.2,
                sm_active_pct=27.5,
                vram_used_bytes=int(7.4 * GIB),
                vram_peak_bytes=int(7.9 * GIB),
                vram_total_bytes=24 * GIB,
                power_w=198.0,
                energy_j=46200.0,
                temperature_peak_c=54.0,
                throttled_share=0.0,
            ),
        ),
        findings=(
            found(
                "input_cpu_bound",
                share,
                "severe",
                (
                    "data wait takes 58 % of the wall time, 318 ms of each 486 ms step",
                    "the 2 workers are busy 97 % of the time and spend 88 % of it on the CPU",
                    "71 % of the workers' time is image.convert('RGB') at dataset.py:48",
                ),
                "dataset.py:48",
                "raise num_workers 2 → 7 at train.py:31; the quota allows 8 CPUs and the job uses 2.4",
                (2.6, 3.1),
            ),
            found(
                "validation_heavy",
                0.06,
                "warn",
                ("validation takes 14.4 s, 6 % of the wall time, 3 times",),
                "train.py:83",
                "validate every 2nd epoch, or give the validation loader workers of its own",
                (1.02, 1.03),
            ),
            found(
                "transfer_blocking",
                0.017,
                "info",
                ("900 copies of 19 MB from pageable memory block the training thread for 9 ms a step",),
                "train.py:60",
                "pin_memory=True at train.py:31 and .to(device, non_blocking=True) at train.py:60",
                (1.01, 1.02),
            ),
        ),
        abstained=(Abstention("launch_bound", "the lag between host and GPU"), Abstention("padding_waste", "lengths")),
        checklist=(
            CheckLine("Batch size as asked", "ok", "64 (expected: 64)"),
            CheckLine("GPU memory use > 30 %", "ok", "33 % (7.9 of 24.0 GiB)"),
            CheckLine("GPU use > 80 %", "fail", "34 %", "The loader is the limit: see the first finding."),
            CheckLine("Speed near the compute ceiling", "fail", "32 % (132 of 413 samples/s)"),
            CheckLine("No loader bottleneck", "fail", "data wait is 58 %", "raise num_workers 2 → 7 at train.py:31"),
            CheckLine("Target metric", "skip", "not recorded"),
        ),
        settings=(
            ("num_workers", 2),
            ("prefetch_factor", 2),
            ("pin_memory", False),
            ("persistent_workers", False),
            ("batch_size", 64),
            ("accumulation", 1),
            ("precision", "bfloat16"),
            ("compile", False),
            ("torch_threads", 8),
            ("residency", None),
        ),
        ranks=(RankSummary(0, ledger.buckets, 450, wall_s - ledger.buckets.startup_s, 0.0, True),),
        step=mean_step(spans),
        gpu_step=GpuStep(0.131, 0.024, mean_step(spans).gpu_idle_s),
    )
    samples = samples_over(wall_s, util_pct=34, cpu_pct=240)
    return Run("fulltilt-runs/20260114-093012-train", run, (record,), (tuple(spans),), samples), diagnosis


def healthy() -> Reported:
    """The same job with seven workers: at its compute ceiling."""
    starved_run, starved_answer = starved()
    tape = Tape(seed=3)
    tape.outside(startup_s=7.1)
    for epoch in range(3):
        tape.steps(
            150,
            batch=64,
            epoch=epoch,
            load_s=0.0012,
            transfer_s=0.0011,
            forward_s=0.048,
            backward_s=0.093,
            optimizer_s=0.014,
            other_s=0.001,
            gpu=True,
        )
        tape.outside(epoch=epoch, validation_s=1.9)
        tape.outside(epoch=epoch, checkpoint_s=1.1)
    spans = tape.spans
    wall_s = spans[-1].t1_s
    ledger = ledger_of(spans)
    record = rank(
        spans,
        loaders=(
            replace(
                loader(7, batches=450, batch=64, wait_s=0.6),
                pin_memory=True,
                persistent_workers=True,
                prefetch_factor=4,
            ),
        ),
        workers=(
            WorkerRecord(
                0,
                7,
                450,
                0.97 * 450,
                0.83 * 450,
                0.08 * 450,
                56.0,
                0.9 * 450,
                9 * GIB,
                (HotLine("dataset.py:48", "PhotoFolder.__getitem__", 310.0, "image.convert('RGB')"),),
            ),
        ),
        precision=PrecisionRecord("bfloat16", "float32", True, False),
        deep=DeepRecord(
            steps=8,
            step_s=0.161,
            gpu_busy_s=0.156,
            kernel_gaps_s=0.003,
            copies_s=0.0011,
            kernels=1840,
            tensor_core_share=0.71,
            top_kernels=(HotLine("", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", 0.061),),
            sync_calls=(HotLine("train.py:70", "train", 0.0009, "loss.item()"),),
        ),
    )
    run = replace(
        starved_run.run,
        name="20260114-101544-train",
        started_at="2026-01-14T10:15:44+01:00",
        wall_s=wall_s,
    )
    diagnosis = replace(
        starved_answer,
        verdict=Verdict(
            "compute_bound",
            ledger.buckets.compute_s / wall_s,
            "The job runs at its compute ceiling: 403 of 413 samples/s, with 1 % of the time waiting for data.",
        ),
        ledger=ledger,
        throughput=Throughput(403.4, 6.30, 450, 28800),
        ceilings=Ceilings(412.9, 474.0),
        gpu=(
            replace(starved_answer.gpu[0], util_pct=97.4, sm_active_pct=81.0, power_w=402.0, temperature_peak_c=71.0),
        ),
        findings=(
            found(
                "compute_bound",
                ledger.buckets.compute_s / wall_s,
                "info",
                ("the GPU computes 98 % of each step", "SM active is 81 %, so the 97 % utilisation is real"),
                None,
                "nothing to fix in the input; torch.compile or a larger batch are what is left",
                None,
            ),
        ),
        checklist=(
            CheckLine("Batch size as asked", "ok", "64 (expected: 64)"),
            CheckLine("GPU memory use > 30 %", "ok", "33 % (7.9 of 24.0 GiB)"),
            CheckLine("GPU use > 80 %", "ok", "97 %"),
            CheckLine("Speed near the compute ceiling", "ok", "98 % (403 of 413 samples/s)"),
            CheckLine("No loader bottleneck", "ok", "data wait is 1 %"),
        ),
        settings=(
            ("num_workers", 7),
            ("prefetch_factor", 4),
            ("pin_memory", True),
            ("persistent_workers", True),
            *starved_answer.settings[4:],
        ),
        ranks=(RankSummary(0, ledger.buckets, 450, wall_s - ledger.buckets.startup_s, 0.0, True),),
        step=mean_step(spans),
    )
    samples = samples_over(wall_s, util_pct=97, cpu_pct=640)
    return Run("fulltilt-runs/20260114-101544-train", run, (record,), (tuple(spans),), samples), diagnosis


def cpu_only() -> Reported:
    """A job on the CPU that loads in the training process itself."""
    tape = Tape(seed=5)
    tape.outside(startup_s=2.2)
    tape.steps(
        200,
        batch=32,
        epoch=0,
        load_s=0.041,
        forward_s=0.022,
        backward_s=0.039,
        optimizer_s=0.004,
        other_s=0.011,
        gpu=False,
    )
    spans = tape.spans
    ledger = ledger_of(spans)
    record = rank(
        spans,
        device="cpu",
        gpu_uuid=None,
        loaders=(loader(0, batches=200, batch=32, wait_s=8.2, wait_cpu_s=2.3),),
        host_lines=(HotLine("fit.py:22", "main", 2.1, "json.dumps(history)"),),
    )
    run = RunRecord(
        name="fit",
        command=("fit.py",),
        started_at="2026-01-14T09:30:12+01:00",
        machine=machine(gpu=False),
        fulltilt="0.1.0",
        state="done",
        wall_s=ledger.wall_s,
        exit_code=0,
    )
    diagnosis = Diagnosis(
        verdict=Verdict(
            "input_serial",
            0.32,
            "Loading takes 32 % of the time because it happens in the training process itself: there are no workers.",
        ),
        ledger=ledger,
        throughput=Throughput(273.0, 8.5, 200, 6400),
        ceilings=Ceilings(492.0, None),
        gpu=(),
        findings=(
            found(
                "input_serial",
                0.32,
                "warn",
                ("data wait takes 8.2 s, of which 2.3 s is CPU time",),
                "train.py:31",
                "num_workers 0 → 2 at train.py:31",
                (1.2, 1.5),
            ),
            found(
                "host_code",
                0.09,
                "info",
                ("json.dumps takes 9 % of the time",),
                "fit.py:22",
                "write the history every 100 steps",
                (1.05, 1.1),
            ),
        ),
        abstained=(Abstention("throttled", "a GPU"),),
        checklist=(CheckLine("GPU use > 80 %", "skip", "no GPU"),),
        settings=(("num_workers", 0), ("batch_size", 32), ("pin_memory", False)),
        step=mean_step(spans),
    )
    samples = samples_over(ledger.wall_s, util_pct=None, cpu_pct=180)
    return Run("fulltilt-runs/fit", run, (record,), (tuple(spans),), samples), diagnosis


def crashed() -> Reported:
    """A script that raised before its first step."""
    tape = Tape()
    tape.outside(startup_s=3.1, unattributed_s=0.02)
    run = RunRecord(
        name="broken",
        command=("broken.py",),
        started_at="2026-01-14T09:30:12+01:00",
        machine=machine(),
        fulltilt="0.1.0",
        state="crashed",
        wall_s=3.12,
        exit_code=1,
    )
    diagnosis = Diagnosis(
        verdict=Verdict("no_steps", 0.0, "The script ended with exit code 1 before its first training step."),
        ledger=ledger_of(tape.spans),
        throughput=Throughput(None, None, 0),
        ceilings=Ceilings(None, None),
        gpu=(),
        findings=(),
        abstained=(),
        checklist=(),
        settings=(),
    )
    return Run("fulltilt-runs/broken", run, (rank(tape.spans),), (tuple(tape.spans),), ()), diagnosis


def straggler() -> Reported:
    """Four ranks under torchrun; rank 2 loads slowly and the others wait for it in the gradient exchange."""
    ranks, spans = [], []
    for number in range(4):
        slow = number == 2
        tape = Tape(seed=number)
        tape.outside(startup_s=8.0)
        tape.steps(
            400,
            batch=32,
            epoch=0,
            load_s=0.061 if slow else 0.006,
            transfer_s=0.001,
            forward_s=0.025,
            backward_s=0.05,
            optimizer_s=0.006,
            communication_s=0.004 if slow else 0.059,
            gpu=True,
        )
        spans.append(tuple(tape.spans))
        ranks.append(
            rank(
                tape.spans,
                number,
                4,
                gpu_uuid=f"{GPU_UUID[:-1]}{number}",
                loaders=(loader(4, batches=400, batch=32, wait_s=24.4 if slow else 2.4),),
                communication=CommunicationRecord(0.06, 0.001),
            )
        )
    ledger = ledger_of(spans[0])
    run = RunRecord(
        name="ddp",
        command=("torchrun", "--nproc-per-node", "4", "train_ddp.py"),
        started_at="2026-01-14T09:30:12+01:00",
        machine=machine(),
        fulltilt="0.1.0",
        state="done",
        wall_s=ledger.wall_s,
        exit_code=0,
    )
    gpu = starved()[1].gpu[0]
    diagnosis = Diagnosis(
        verdict=Verdict(
            "straggler", 0.37, "Three of four GPUs wait 55 ms of each 147 ms step for rank 2, whose loader is slow."
        ),
        ledger=ledger,
        throughput=Throughput(870.0, 6.8, 400, 51200),
        ceilings=Ceilings(1580.0, 2100.0),
        gpu=tuple(replace(gpu, uuid=r.gpu_uuid or "", index=r.rank, util_pct=58.0) for r in ranks),
        findings=(
            found(
                "straggler",
                0.37,
                "severe",
                ("rank 2 waits 61 ms for data in each step, the others 6 ms",),
                "train.py:31",
                "move rank 2's data to the same disk as the others'",
                (1.4, 1.6),
            ),
        ),
        abstained=(),
        checklist=(CheckLine("GPU use > 80 %", "fail", "58 %"),),
        settings=(("num_workers", 4), ("batch_size", 32)),
        ranks=tuple(
            RankSummary(
                number,
                buckets := ledger_of(of_rank).buckets,
                400,
                own_work_s=buckets.total_s - buckets.startup_s - buckets.communication_s,
                waits_s=0.0 if number == 2 else buckets.communication_s - 1.6,
                slowest=number == 2,
            )
            for number, of_rank in enumerate(spans)
        ),
        step=mean_step(spans[0]),
    )
    samples = samples_over(ledger.wall_s, util_pct=58, cpu_pct=500, gpus=4)
    return Run("fulltilt-runs/ddp", run, tuple(ranks), tuple(spans), samples), diagnosis


def running() -> Reported:
    """The starved job, read while it still runs."""
    run, diagnosis = starved()
    return replace(run, run=replace(run.run, state="running", wall_s=None, exit_code=None)), diagnosis


HOSTILE = "<script>alert(1)</script>"


def hostile() -> Reported:
    """The starved job with markup, terminal codes and an undecodable byte wherever a name can stand."""
    run, diagnosis = starved()
    nasty = f"{HOSTILE}\x1b[2J[bold]&\"'\udcff"
    record = run.ranks[0]
    workers = replace(record.workers[0], lines=(HotLine(nasty, nasty, 3.0, nasty),))
    record = replace(
        record,
        hostname=nasty,
        device=nasty,
        optimizers=(nasty,),
        loaders=(replace(record.loaders[0], where=nasty, dataset=nasty),),
        workers=(workers,),
        host_lines=(HotLine(nasty, nasty, 1.0, nasty),),
        notes=(nasty,),
    )
    gpus = tuple(replace(gpu, name=nasty) for gpu in diagnosis.gpu)
    readings = tuple(
        replace(sample, gpus=tuple(replace(gpu, name=nasty, uuid=nasty) for gpu in sample.gpus))
        for sample in run.samples
    )
    hostile_run = replace(
        run,
        folder=nasty,
        run=replace(
            run.run,
            name=nasty,
            command=(nasty, nasty),
            started_at=nasty,
            machine=replace(run.run.machine, hostname=nasty, platform=nasty),
        ),
        ranks=(record,),
        samples=readings,
        warnings=(nasty,),
    )
    finding = replace(diagnosis.findings[0], evidence=(nasty,), where=nasty, fix=nasty)
    return hostile_run, replace(
        diagnosis,
        verdict=Verdict(nasty, 0.5, nasty),
        gpu=gpus,
        findings=(finding,),
        abstained=(Abstention("padding_waste", nasty),),
        checklist=(CheckLine(nasty, "fail", nasty, nasty),),
        settings=((nasty, nasty),),
    )


def write_folder(folder: Path, run: Run) -> Path:
    """A run folder as the recorder leaves it."""
    store.create_folder(folder)
    store.write_json(folder / store.RUN_FILE, run.run)
    for rank_record, spans in zip(run.ranks, run.spans, strict=True):
        store.write_json(folder / store.rank_file(rank_record.rank), rank_record)
        _write_lines(folder / store.steps_file(rank_record.rank), spans)
    _write_lines(folder / store.SAMPLES_FILE, run.samples)
    return folder


def _write_lines(path: Path, values: Iterable[object]) -> None:
    writer = store.LineWriter(path)
    writer.write(values)
    writer.close()
