"""Does Fulltilt say what torch.profiler says? Jobs with a known cause, run plain, traced and under `fulltilt run`.

    python bench/truth.py [--jobs launch,item] [--seconds 13] [--out truth.json]      about ten minutes on an H200

Each job runs twice: plain and then, in the same process, under torch.profiler (CUDA activities alone, which slow the
host down least); and under `fulltilt run`. The true busy share is the union of the profiler's kernel intervals of a
step, without validation, over the step time of the recorded run by the job's own stopwatch, since the machine's pace
differs between runs. Idle time by cause is of the recorded run itself: each stretch of its stopwatch in which the host
queues nothing, from the moment the GPU reached a CUDA event that was queued before it.
Limits: kernel time within 5 %, shares of the step within 3 points, steps and samples exact.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fulltilt.diagnosis.evidence import gather
from fulltilt.store import load

KERNEL_LIMIT, SHARE_LIMIT = 0.05, 0.03
WARM_UP_STEPS = 20
PLAIN_S = 3.0
TRACE_S = 1.0
# Phase of the stopwatch → bucket of the ledger.
BUCKETS = {"data": "data_wait_s", "host": "host_code_s", "validation": "validation_s", "save": "checkpoint_s"}


class Done(Exception):  # noqa: N818 - not an error
    """The job has run for as long as it should."""


class Watch:
    """The job's own stopwatch: steps and samples, what the host does between kernels, and a trace where wanted."""

    def __init__(self, seconds: float, trace: bool) -> None:
        self.seconds, self.trace = seconds, trace
        self.steps = self.samples = self.all_steps = self.all_samples = 0
        self.began = self.step_s = 0.0
        self.phases: list[tuple[str, int, int, torch.cuda.Event]] = []
        self.profiler: Any = None
        self.traced_steps = 0
        self._origin: tuple[int, torch.cuda.Event]  # one moment, on the host's clock and on the GPU's
        self._end: tuple[int, torch.cuda.Event]  # another
        self._step_ended: tuple[int, torch.cuda.Event]

    def drawn(self) -> None:
        """The loop has its batch: it waited for data since the last step."""
        if self.all_steps >= WARM_UP_STEPS:
            began, queued = self._step_ended
            self.phases.append(("data", began, time.time_ns(), queued))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase in which the host queues no kernels of training."""
        began, queued = mark()
        yield
        if self.all_steps >= WARM_UP_STEPS:
            self.phases.append((name, began, time.time_ns(), queued))

    def idle_s(self) -> dict[str, float]:
        """How long the GPU was idle in each phase, per step."""
        origin_ns, origin = self._origin
        ended_ns, end = self._end
        drift = (ended_ns - origin_ns) / (origin.elapsed_time(end) * 1e6)  # 50 ppm of 10 s are half a millisecond
        idle: dict[str, float] = {}
        for name, began, ended, queued in self.phases:
            emptied_ns = origin_ns + origin.elapsed_time(queued) * 1e6 * drift
            idle[name] = idle.get(name, 0.0) + max(ended - max(began, emptied_ns), 0.0)
        return {name: ns * 1e-9 / self.steps for name, ns in idle.items()}

    def step(self, samples: int) -> None:
        """A step of so many samples has been queued."""
        self.all_steps += 1
        self.all_samples += samples
        if self.all_steps == WARM_UP_STEPS:
            self._origin = reached()
            self.began = time.perf_counter()
        elif self.profiler is not None:
            self.traced_steps += 1
            if time.perf_counter() - self.began > TRACE_S and self.traced_steps >= 3:
                torch.cuda.synchronize()
                self.profiler.stop()
                raise Done
        elif self.all_steps > WARM_UP_STEPS:
            self.steps += 1
            self.samples += samples
            if time.perf_counter() - self.began > self.seconds:
                self._end = reached()
                self.step_s = (time.perf_counter() - self.began) / self.steps
                if not self.trace:
                    raise Done
                kinds = torch.profiler.ProfilerActivity
                self.profiler = torch.profiler.profile(activities=[kinds.CUDA])
                self.profiler.start()
                self.began = time.perf_counter()
        self._step_ended = mark()

    def truth(self) -> dict[str, Any]:
        """What the job counted, and what the trace says of a step."""
        told: dict[str, Any] = {"steps": self.all_steps, "samples": self.all_samples, "step_s": self.step_s}
        if self.profiler is None:
            return {**told, "idle_s": self.idle_s()}
        events = [
            event
            for event in self.profiler.profiler.kineto_results.events()
            if "CUDA" in str(event.device_type()) and not event.name().startswith(("Memcpy HtoD", "Memcpy DtoH"))
        ]
        pauses = [(begin, end) for name, begin, end, _ in self.phases if name == "validation"]
        work = union(
            (event.start_ns(), event.start_ns() + event.duration_ns())
            for event in events
            if not any(begin <= event.start_ns() < end for begin, end in pauses)
        )
        return {
            **told,
            "kernel_s": sum(end - begin for begin, end in work) * 1e-9 / self.traced_steps,
            "kernels": len(events) / self.traced_steps,
        }


def mark() -> tuple[int, torch.cuda.Event]:
    """Now, and an event after all that has been queued."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return time.time_ns(), event


def reached() -> tuple[int, torch.cuda.Event]:
    """A moment on both clocks: the GPU has nothing else to do."""
    torch.cuda.synchronize()
    _, event = mark()
    torch.cuda.synchronize()
    return time.time_ns(), event


def union(ranges: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges with those that touch each other joined."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


# --------------------------------------------------------------------------- jobs


def stack(width: int, depth: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 10)).to("cuda", dtype)


def batch_of(size: int, width: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, width, device="cuda", dtype=dtype), torch.zeros(size, device="cuda", dtype=torch.long)


class Rows(Dataset[tuple[torch.Tensor, int]]):
    """Samples that take ``work_s`` of a CPU, or of waiting, each."""

    def __init__(self, length: int, width: int, work_s: float = 0.0, wait_s: float = 0.0) -> None:
        self.length, self.width, self.work_s, self.wait_s = length, width, work_s, wait_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        ends = time.perf_counter() + self.work_s
        while time.perf_counter() < ends:
            pass
        time.sleep(self.wait_s)
        return torch.full((self.width,), float(index % 7)), index % 10


def update(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = nn.functional.cross_entropy(model(x).float(), y)
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    optimizer.step()
    return loss


def on_one_batch(watch: Watch, model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    while True:
        update(model, optimizer, *batch)
        watch.step(len(batch[0]))


def compute(watch: Watch) -> None:
    on_one_batch(watch, stack(2048, 8, torch.bfloat16), batch_of(16384, 2048, torch.bfloat16))


def float32(watch: Watch) -> None:
    on_one_batch(watch, stack(4096, 4), batch_of(4096, 4096))


def launch(watch: Watch) -> None:
    on_one_batch(watch, stack(256, 12), batch_of(64, 256))


def compiled(watch: Watch) -> None:
    on_one_batch(watch, torch.compile(stack(1024, 12, torch.bfloat16)), batch_of(2048, 1024, torch.bfloat16))


def cuda_graphs(watch: Watch) -> None:
    x, y = batch_of(256, 512)
    on_one_batch(watch, torch.cuda.make_graphed_callables(stack(512, 12), (x,)), (x, y))


def accumulation(watch: Watch) -> None:
    model, (x, y) = stack(1024, 8, torch.bfloat16), batch_of(512, 1024, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    while True:
        for _ in range(4):
            torch.autograd.backward(nn.functional.cross_entropy(model(x).float(), y))
        optimizer.step()
        optimizer.zero_grad()
        watch.step(4 * len(x))


def from_loader(watch: Watch, data: Rows, width: int, dtype: torch.dtype = torch.bfloat16, **how: Any) -> None:
    model = stack(width, 8, dtype)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    loader = DataLoader(data, pin_memory=True, **how)
    while True:
        for x, y in loader:
            watch.drawn()
            update(model, optimizer, x.to("cuda", dtype, non_blocking=True), y.to("cuda", non_blocking=True))
            watch.step(len(x))


def workers(watch: Watch) -> None:
    from_loader(watch, Rows(10_000_000, 1024), 1024, batch_size=256, num_workers=8)


def workers_busy(watch: Watch) -> None:
    from_loader(watch, Rows(100_000, 1024, work_s=0.001), 1024, batch_size=64, num_workers=4)


def workers_wait(watch: Watch) -> None:
    from_loader(watch, Rows(100_000, 1024, wait_s=0.004), 1024, batch_size=16, num_workers=2)


def no_workers(watch: Watch) -> None:
    from_loader(watch, Rows(100_000, 1024, work_s=0.0003), 1024, batch_size=32)


def short_epochs(watch: Watch) -> None:
    from_loader(watch, Rows(64 * 20, 1024), 1024, batch_size=64, num_workers=4)


def list_of_batches(watch: Watch) -> None:
    model = stack(2048, 6, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    y = torch.zeros(32 * 512, dtype=torch.long, device="cuda")
    random = numpy.random.default_rng(0)
    while True:
        with watch.phase("host"):
            arrays = [random.random((512, 2048), numpy.float32) for _ in range(10)]
            batches = [torch.from_numpy(array).pin_memory() for array in arrays]
        for batch in batches:
            x = batch.to("cuda", non_blocking=True).bfloat16().repeat(32, 1)
            update(model, optimizer, x, y)
            watch.step(len(x))


def item(watch: Watch) -> None:
    model, (x, y) = stack(4096, 16, torch.bfloat16), batch_of(4096, 4096, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    norms = {}
    while True:
        torch.autograd.backward(nn.functional.cross_entropy(model(x).float(), y))
        for name, parameter in model.named_parameters():
            norms[name] = parameter.grad.norm().item() if parameter.grad is not None else 0.0
        optimizer.step()
        optimizer.zero_grad()
        watch.step(len(x))


def pageable(watch: Watch) -> None:
    model = stack(2048, 4, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    x, y = torch.randn(8192, 2048), torch.zeros(8192, dtype=torch.long)
    while True:
        update(model, optimizer, x.to("cuda").bfloat16(), y.to("cuda"))
        watch.step(len(x))


def sleeping(watch: Watch) -> None:
    model, batch = stack(2048, 8, torch.bfloat16), batch_of(2048, 2048, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    while True:
        update(model, optimizer, *batch)
        with watch.phase("host"):
            time.sleep(0.004)
        watch.step(len(batch[0]))


def validating(watch: Watch) -> None:
    model, batch = stack(2048, 8, torch.bfloat16), batch_of(16384, 2048, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    while True:
        for _ in range(5):
            update(model, optimizer, *batch)
            watch.step(len(batch[0]))
        torch.cuda.synchronize()
        with watch.phase("validation"), torch.no_grad():
            model.eval()
            for _ in range(10):
                model(batch[0])
            torch.cuda.synchronize()
            model.train()


def saving(watch: Watch) -> None:
    model, batch = stack(2048, 8), batch_of(2048, 2048)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    step = 0
    while True:
        update(model, optimizer, *batch)
        step += 1
        if step % 20 == 0:
            torch.cuda.synchronize()
            with watch.phase("save"):
                torch.save(model.state_dict(), folder / "last.pt")
        watch.step(len(batch[0]))


def trainer(watch: Watch) -> None:
    from transformers import BertConfig, BertForMaskedLM, Trainer, TrainerCallback, TrainingArguments

    sizes = {"hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 512}
    model = BertForMaskedLM(BertConfig(vocab_size=2000, **sizes))
    ids = torch.randint(0, 2000, (4096, 64))
    data = [{"input_ids": row, "labels": row} for row in ids]

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            watch.step(16)

    out = tempfile.mkdtemp(dir="/dev/shm")
    arguments = TrainingArguments(
        out, per_device_train_batch_size=16, num_train_epochs=1000, report_to=[], disable_tqdm=True, save_strategy="no"
    )
    Trainer(model, arguments, train_dataset=data, callbacks=[Steps()]).train()


def lightning(watch: Watch) -> None:
    import lightning as pl

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = stack(1024, 8)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1e-4)

        def on_train_batch_end(self, _outputs: Any, batch: Any, _: int) -> None:
            watch.step(len(batch[0]))

    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    loader = DataLoader(Rows(100_000, 1024), batch_size=256, num_workers=8, pin_memory=True)
    pl.Trainer(accelerator="gpu", devices=1, max_epochs=1000, **quiet).fit(Module(), loader)


JOBS: dict[str, tuple[Callable[[Watch], None], tuple[str, ...]]] = {
    "compute": (compute, ("compute_bound",)),
    "float32": (float32, ("precision_unused",)),
    "launch": (launch, ("launch_bound",)),
    "compiled": (compiled, ("launch_bound", "compute_bound", "batch_too_small")),
    "cuda_graphs": (cuda_graphs, ("launch_bound", "batch_too_small")),
    "accumulation": (accumulation, ("launch_bound", "batch_too_small")),
    "workers": (workers, ("launch_bound", "input_handover", "input_cpu_bound")),
    "workers_busy": (workers_busy, ("input_cpu_bound",)),
    "workers_wait": (workers_wait, ("input_io_bound",)),
    "no_workers": (no_workers, ("input_serial",)),
    "short_epochs": (short_epochs, ("epoch_restart",)),
    "list_of_batches": (list_of_batches, ("host_code",)),
    "item": (item, ("sync_point",)),
    "pageable": (pageable, ("transfer_blocking",)),
    "sleeping": (sleeping, ("host_code",)),
    "validating": (validating, ("validation_heavy",)),
    "saving": (saving, ("checkpoint_stall",)),
    "trainer": (trainer, ("launch_bound",)),
    "lightning": (lightning, ("launch_bound", "input_handover", "input_cpu_bound")),
}


# --------------------------------------------------------------------------- the truth and what Fulltilt says


def run_job(name: str, seconds: float, trace: bool) -> dict[str, Any]:
    """Run the job and say what it counted."""
    watch = Watch(seconds, trace)
    with suppress(Done):
        JOBS[name][0](watch)
    return watch.truth()


def traced(name: str, seconds: float) -> dict[str, Any]:
    """The plain and the traced run, in a fork of this process: torch is imported already, CUDA is not begun."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as process:
        return process.submit(run_job, name, seconds, True).result(timeout=90)


def observed(name: str, seconds: float, out: Path) -> dict[str, Any]:
    """The run under `fulltilt run`."""
    job = [__file__, "--seconds", str(seconds), "--worker", name]
    command = [sys.executable, "-m", "fulltilt", "run", "--out", str(out), "--", sys.executable, *job]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=90)
    lines = [line for line in done.stdout.splitlines() if line.startswith("TRUTH ")]
    if not lines:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
    counted: dict[str, Any] = json.loads(lines[0].removeprefix("TRUTH "))
    return counted


def compare(name: str, seconds: float, keep: Path | None) -> dict[str, Any]:
    """One row: the profiler's figures, Fulltilt's, and what lies outside the limits."""
    true = traced(name, PLAIN_S)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        out = (keep or Path(folder)) / name
        counted = observed(name, seconds, out)
        told = json.loads((out / "findings.json").read_text())
        run = load(out)
    traced_kernels, launch_s = run.ranks[0].kernels, gather(run).launch_s or 0.0
    kernels_s = traced_kernels.busy_s if traced_kernels is not None else None
    steps_per_s = told["throughput"]["steps_per_s"] or 0.0
    step_s = counted["step_s"]
    row: dict[str, Any] = {
        "job": name,
        "plain_step_ms": true["step_s"] * 1e3,
        "step_ms": step_s * 1e3,
        "told_step_ms": 1e3 / steps_per_s if steps_per_s else None,
        "kernel_ms": true["kernel_s"] * 1e3,
        "told_kernel_ms": kernels_s * 1e3 if kernels_s else None,
        "busy": true["kernel_s"] / step_s,
        "told_busy": kernels_s * steps_per_s if kernels_s else None,
        "verdict": told["verdict"]["code"],
        "expected": JOBS[name][1],
        "idle": {},
        "told_idle": {},
    }
    buckets = told["ledger"]["buckets"]
    after_startup_s = told["ledger"]["wall_s"] - buckets["startup_s"]
    row["told"] = {bucket: seconds / after_startup_s for bucket, seconds in buckets.items() if seconds}
    row["launch"] = launch_s / after_startup_s
    row["findings"] = [finding["code"] for finding in told["findings"]]
    for phase, idle_s in counted["idle_s"].items():
        row["idle"][phase] = idle_s / step_s
        bucket_s = buckets[BUCKETS[phase]] + (buckets["epoch_turnover_s"] if phase == "data" else 0.0)
        if phase == "host":
            bucket_s -= launch_s
        row["told_idle"][phase] = bucket_s / told["throughput"]["steps"] / step_s
    wrong = []
    if row["told_kernel_ms"] is None or abs(row["told_kernel_ms"] / row["kernel_ms"] - 1) > KERNEL_LIMIT:
        wrong.append("kernel time")
    if row["told_busy"] is None or abs(row["told_busy"] - row["busy"]) > SHARE_LIMIT:
        wrong.append("busy share")
    wrong += [f"idle: {p}" for p, share in row["idle"].items() if abs(row["told_idle"][p] - share) > SHARE_LIMIT]
    if told["throughput"]["steps"] != counted["steps"]:
        wrong.append(f"steps {told['throughput']['steps']} of {counted['steps']}")
    if told["throughput"].get("samples") not in (None, counted["samples"]):
        wrong.append(f"samples {told['throughput']['samples']} of {counted['samples']}")
    if row["verdict"] not in row["expected"]:
        wrong.append(f"verdict {row['verdict']}")
    return {**row, "wrong": wrong}


def figure(value: float | None, scale: float = 1.0) -> str:
    return "–" if value is None else f"{value * scale:.3g}"


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| job | step ms, told | kernels ms, told | busy %, told | idle by cause %, told | verdict | outside |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['job']} | error: {row['error'].splitlines()[-1]} |")
            continue
        idle = ", ".join(
            f"{phase} {figure(share, 100)}, {figure(row['told_idle'][phase], 100)}"
            for phase, share in row["idle"].items()
        )
        lines.append(
            f"| {row['job']} | {figure(row['step_ms'])}, {figure(row['told_step_ms'])} "
            f"| {figure(row['kernel_ms'])}, {figure(row['told_kernel_ms'])} "
            f"| {figure(row['busy'], 100)}, {figure(row['told_busy'], 100)} "
            f"| {idle or '–'} | {row['verdict']} | {'; '.join(row['wrong']) or 'no'} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--seconds", type=float, default=13.0, help="of the observed run")
    parser.add_argument("--out", type=Path, default=Path("truth.json"))
    parser.add_argument("--keep", type=Path, help="a folder for the run folders")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        print("TRUTH " + json.dumps(run_job(asked.worker, asked.seconds, trace=False)), flush=True)
        return
    rows = []
    for name in asked.jobs.split(","):
        try:
            rows.append(compare(name, asked.seconds, asked.keep))
        except (RuntimeError, subprocess.TimeoutExpired, TimeoutError, StopIteration, OSError) as error:
            rows.append({"job": name, "error": str(error) or type(error).__name__})
            print(error, file=sys.stderr, flush=True)
        facts = {"torch": torch.__version__, "python": platform.python_version(), "cpus": os.cpu_count()}
        asked.out.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
