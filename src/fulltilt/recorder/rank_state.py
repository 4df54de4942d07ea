"""What is recorded of one rank besides its time: loaders, workers, lines, copies, precision, communication."""

from __future__ import annotations

import os
import socket
import sys
import time
import uuid
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from fulltilt import records
from fulltilt.recorder.interpreter_lock import OtherThreads, cpu_times_s
from fulltilt.recorder.intervals import IntervalBuilder
from fulltilt.recorder.launchers import RANKED
from fulltilt.recorder.loaders import LoaderRegistry
from fulltilt.recorder.loaders.workers import WorkerTotals, allowed_cpus
from fulltilt.recorder.marks import Activity
from fulltilt.recorder.stacks.frames import StackView
from fulltilt.recorder.stacks.line_times import LineGrowth, LineTimes


def memory_parts(torch: Any, optimizers: Iterable[Any], gpu: int | None) -> records.MemoryRecord:
    """Memory by part. Call it just after an optimizer's step, when gradients and states are there."""
    parameters: dict[int, Any] = {}
    states = 0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            parameters.update((id(parameter), parameter) for parameter in group["params"])
        leaves = torch.utils._pytree.tree_leaves(list(optimizer.state.values()))
        states += sum(_bytes(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
    weights = sum(_bytes(parameter) for parameter in parameters.values())
    gradients = sum(_bytes(parameter.grad) for parameter in parameters.values() if parameter.grad is not None)
    other = None
    if gpu is not None:
        other = max(0, int(torch.cuda.memory_allocated(gpu)) - weights - gradients - states)
    count = sum(int(parameter.numel()) for parameter in parameters.values())
    return records.MemoryRecord(count, weights, gradients, states, other)


def _bytes(tensor: Any) -> int:
    local = getattr(tensor, "_local_tensor", tensor)  # of a sharded tensor only the part on this GPU
    return int(local.numel() * local.element_size())


@dataclass
class Copies:
    """Host-to-GPU copies of the training thread."""

    copies: float = 0.0
    bytes: float = 0.0
    asked: int = 0
    pageable: int = 0
    blocking: float = 0.0
    lines: LineTimes = field(default_factory=LineTimes)

    def add(self, copied_bytes: int, blocking: bool, weight: float) -> None:
        """Add a copy; in a burst it has the ``weight`` of several."""
        self.copies += weight
        self.bytes += weight * copied_bytes
        self.blocking += weight * blocking

    def record(self, scale: float) -> records.TransferRecord | None:
        """The copies as a record, scaled to the whole run; None when there were none."""
        if not self.copies:
            return None
        top = self.lines.top(1)
        return records.TransferRecord(
            copies=round(scale * self.copies),
            bytes=round(scale * self.bytes),
            pageable_share=self.pageable / self.asked if self.asked else None,
            blocking_share=self.blocking / self.copies,
            where=top[0].where if top else None,
        )


@dataclass
class Garbage:
    """Garbage collections on the training thread since training began."""

    collections: int = 0
    full: int = 0
    seconds: float = 0.0
    longest_s: float = 0.0
    asked_for: LineTimes = field(default_factory=LineTimes)

    def add(self, took_s: float, full: bool, where: str, function: str) -> None:
        """A collection has ended; ``where`` is the line that called gc.collect(), or empty."""
        self.collections += 1
        self.full += full
        self.seconds += took_s
        self.longest_s = max(self.longest_s, took_s)
        if where:
            self.asked_for.charge(where, function, took_s, "gc.collect()")

    def record(self) -> records.GarbageRecord | None:
        """The collections as a record; None when there were none."""
        if not self.collections:
            return None
        return records.GarbageRecord(self.collections, self.full, self.seconds, self.longest_s, self.asked_for.top(3))


class CostlyLines:
    """The lines of one rank that cost time, by what they do."""

    def __init__(self) -> None:
        self.host = LineTimes()
        self.host_growth = LineGrowth(self.host)
        self.computing = LineTimes()
        self.drawing = LineTimes()  # making batches, or waiting for them, without a loader
        self.drawn_from = LineTimes()
        self.loop_calls = LineTimes()
        self.waiting_for_gpu = LineTimes()
        self.saving = LineTimes()
        self.validating = LineTimes()

    def add(self, view: StackView, weight_s: float) -> None:
        """A stack sample of the training thread, outside of loaders."""
        if view.kind in ("host", "data_wait"):
            self.host.add(view, weight_s)
            if view.kind == "data_wait":
                self.drawing.add(view, weight_s)
            if view.drawn_from is not None:
                where, generator, call = view.drawn_from
                self.drawn_from.charge(where, generator, weight_s, call)
        elif view.kind == "torch":
            self.computing.add(view, weight_s)
        elif view.kind == "checkpoint":
            self.saving.add(view, weight_s)
        if view.called_at is not None and view.kind == "host":
            where, function, call = view.called_at
            self.loop_calls.charge(where, function, weight_s, call)

    def fields(self, steps: int, on_gpu: bool, scale: float) -> dict[str, Any]:
        """The fields of a RankRecord with lines; measured waits are multiplied by ``scale``."""
        return {
            "host_lines": self.host.top(),
            "growing_lines": self.host_growth.top(steps),
            "compute_lines": () if on_gpu else self.computing.top(),
            "drawing_lines": self.drawing.top(),
            "drawn_from": next(iter(self.drawn_from.top(1)), None),
            "loop_calls": self.loop_calls.top(3),
            "sync_lines": self.waiting_for_gpu.top(scale=scale),
            "checkpoint_lines": self.saving.top(),
            "validation_lines": self.validating.top(),
        }


MOST_REMARKS = 20


class RankState:
    """Everything that goes into a records.RankRecord."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        # From the launcher's environment; ranks that the script itself spawns know it once their group exists.
        self.rank = _number_in("RANK", 0)
        self.world_size = _number_in("WORLD_SIZE", 1)
        self.group: str | None = None
        self.gpu = 0  # torch's number for it: the current one is each thread's own, and the observer's is 0
        self.cpus_at_start: int | None = None  # usable by this process before the script set anything
        self._parent_pid = os.getppid()  # it may end before this process does
        self.loaders: LoaderRegistry  # set by the session: it needs the recorder, which needs this
        self.steps = 0
        self.steps_attributed = 0
        self.launch_s = 0.0
        self.gpu_busy_s = 0.0
        self.gpu_steps = 0
        self.lines = CostlyLines()
        self.syncs = 0.0
        self.copies = Copies()
        self.garbage = Garbage()
        self.optimizers: dict[int, str] = {}
        self.optimizer_calls = 0
        self.learning_rate: float | None = None
        self.parameter_dtype: str | None = None
        self.fused_optimizer: bool | None = None
        self.memory: records.MemoryRecord | None = None
        self.autocast: str | None = None
        self.scaler = False
        self.replicas: list[weakref.ref[Any]] = []
        self.replicas_where: str | None = None
        self.communication: records.CommunicationRecord | None = None
        self.unused_search: records.UnusedSearchRecord | None = None
        self.sharded = False
        self.measures_exchange = False
        self.deep: records.DeepRecord | None = None
        self.kernels: records.KernelRecord | None = None
        self.uses_cuda_graphs = False
        self.flops_per_call: float | None = None
        # What torch.compile did, asked for each time that the record is written.
        self.compiling: Callable[[], records.CompileRecord | None] = lambda: None
        self.remarks: list[str] = []
        self._vram_peak_bytes: int | None = None
        self.training_thread = os.getpid()  # the main thread, unless another one takes steps
        self.threads = OtherThreads()
        self._first_times: tuple[float, float, float] | None = None
        # What live tuning did, asked for each time that the record is written.
        self.live: Callable[[], tuple[records.LiveRecord, ...]] = tuple

    # ------------------------------------------------------------------ while it runs

    def remark(self, text: str) -> None:
        """Add a note to the record, once."""
        if text not in self.remarks and len(self.remarks) < MOST_REMARKS:
            self.remarks.append(text)

    def resolve_waiting(self, view: StackView) -> StackView:
        """The view with its meaning in this job: waiting is data wait, unless loaders bring the data."""
        if view.kind != "waiting":
            return view
        loaders = self.loaders
        fed = not loaders.drawn_elsewhere and any(stats.trains for stats in loaders.all)
        return replace(view, kind="host" if fed else "data_wait")

    def sampled(self, activity: Activity, view: StackView, weight_s: float) -> None:
        """A stack sample of the training thread."""
        if activity is not Activity.DATA_WAIT:
            self.lines.add(view, weight_s)
        elif (waiting := self.loaders.waiting_for) is not None:
            if waiting.serial:
                waiting.fetch_lines.add(view, weight_s)
            if view.sampling:
                waiting.sampler_lines.add(view, weight_s)

    def sampled_in_validation(self, view: StackView, weight_s: float) -> None:
        """A stack sample of the user's own time while the job validates; of torch's work there no line is kept."""
        if view.kind == "host":
            self.lines.validating.add(view, weight_s)

    def waited_for_gpu(self, where: str, function: str, call: str, took_s: float, weight: float) -> None:
        """A call waited for the GPU; in a burst it has the ``weight`` of several."""
        self.syncs += weight
        self.lines.waiting_for_gpu.charge(where, function, weight * took_s, call)

    def evaluating(self, eval_mode: bool) -> bool:
        """Whether the training thread evaluates now. (Intervals know it only later.)"""
        return eval_mode or self.loaders.was_evaluating

    def poll(self) -> None:
        """Take in the messages of workers, and what other threads did."""
        self.lines.host_growth.note(self.steps)
        if self.steps:
            self.threads.poll(self.training_thread)
        for message in self.loaders.worker_socket.receive():
            stats = self.loaders.all[message.loader]
            in_pass = stats.passes if stats.described.get("persistent_workers") else message.in_pass
            stats.workers = stats.workers or WorkerTotals()
            stats.workers.add(message, in_pass)

    def exposed_communication_s(self) -> float:
        """Seconds of gradient exchange per step that no computation hides; 0.0 where each step marks them."""
        seen = None if self.measures_exchange else self.communication
        if seen is None or seen.communication_s is None:  # marked, or not known
            return 0.0
        return max(0.0, seen.communication_s - (seen.overlapped_s or 0.0))

    def read_communication(self) -> None:
        """Ask DistributedDataParallel for its own timings. On the training thread only."""
        for reference in self.replicas:
            replica = reference()
            if replica is None:
                continue
            data = replica._get_ddp_logging_data()
            # A static graph is searched in the first step only.
            if data.get("find_unused_parameters") and not getattr(replica, "static_graph", False):
                before = self.unused_search or records.UnusedSearchRecord(self.replicas_where, 0, 0)
                unused_bytes = max(before.unused_bytes, int(data.get("unused_parameter_size", 0)))
                self.unused_search = replace(before, asked=before.asked + 1, unused_bytes=unused_bytes)
            communication = data.get("avg_backward_comm_time")
            if communication:
                self.communication = records.CommunicationRecord(
                    communication_s=communication * 1e-9,
                    overlapped_s=data.get("avg_backward_compute_comm_overlap_time", 0) * 1e-9,
                )

    def learn_rank(self) -> None:
        """Ask torch which rank this process is. Not at the end: most scripts have left the group by then."""
        module = sys.modules.get("torch.distributed")
        if module is not None and module.is_available() and module.is_initialized():
            self.rank, self.world_size = int(module.get_rank()), int(module.get_world_size())
        elif "horovod" in sys.modules:  # it has no process group of torch's
            for rank, world_size, _ in RANKED:
                if _number_in(world_size, 1) > 1:
                    self.rank, self.world_size = _number_in(rank, 0), _number_in(world_size, 1)
                    return

    def learn_group(self) -> None:
        """Ask the process group's store for the group's name. On the training thread only: it uses the store, too."""
        if self.group is None and self.world_size > 1 and "horovod" not in sys.modules:
            self.group = _name_of_group(sys.modules["torch.distributed"], self.world_size)

    # ------------------------------------------------------------------ the record

    def trained(self, builder: IntervalBuilder) -> bool:
        """Whether this process has begun to train at all. Launchers and helpers never do."""
        drawn = any(stats.batches for stats in self.loaders.all)
        return bool(self.steps or builder.counter.backwards or drawn)

    def record(
        self, stream: int, t1_s: float, finished: bool, builder: IntervalBuilder, on_gpu: bool, scale: float
    ) -> records.RankRecord:
        """Everything noted so far; ``scale`` is what totals over measured calls must be multiplied by."""
        trained = builder.counter.train_loaders
        cuda = self._torch.cuda if on_gpu else None
        stats = cuda.memory_stats(self.gpu) if cuda is not None else {}
        times = self._training_thread_s()
        return records.RankRecord(
            rank=stream,
            world_size=self.world_size,
            pid=os.getpid(),
            parent_pid=self._parent_pid,
            hostname=socket.gethostname(),
            device=f"cuda:{self.gpu}" if cuda is not None else "cpu",
            gpu_uuid=self._gpu_uuid(cuda),
            t0_s=0.0,
            t1_s=t1_s,
            finished=finished,
            steps=self.steps_attributed,
            backwards=builder.counter.backwards,
            optimizers=tuple(self.optimizers.values()),
            optimizer_calls=self.optimizer_calls,
            learning_rate=self.learning_rate,
            loaders=tuple(stats.record(stats.loader_id in trained) for stats in self.loaders.all),
            workers=tuple(filter(None, (stats.worker_record() for stats in self.loaders.all))),
            **self.lines.fields(self.steps, on_gpu, scale),
            syncs=round(scale * self.syncs),
            transfer=self.copies.record(scale),
            precision=records.PrecisionRecord(
                autocast=self.autocast,
                parameters=self.parameter_dtype,
                tf32=self._tf32(),
                compiled=self.compiled,
                cudnn_benchmark=bool(self._torch.backends.cudnn.benchmark) if on_gpu else None,
                fused_optimizer=self.fused_optimizer,
            ),
            communication=self.communication,
            unused_search=self.unused_search,
            sharded=self.sharded,
            deep=self.deep,
            kernels=self.kernels,
            compile=self.compiling(),
            garbage=self.garbage.record(),
            gpu_busy_step_s=self.gpu_busy_s / self.gpu_steps if self.gpu_steps else None,
            launch_s=self.launch_s if on_gpu else None,
            flops_per_call=self.flops_per_call,
            vram_peak_bytes=self._highest_peak(stats.get("allocated_bytes.all.peak")),
            alloc_retries=stats.get("num_alloc_retries"),
            memory=self.memory,
            torch_threads=self._torch.get_num_threads(),
            cpus_at_start=self.cpus_at_start,
            cpus=len(allowed_cpus()),
            cpu_wait_s=None if times is None else times[2],
            off_cpu_s=None if times is None else times[0] - times[1],
            threads=self.threads.record(),
            notes=tuple(self.remarks),
            live=self.live(),
            group=self.group,
        )

    def _training_thread_s(self) -> tuple[float, float, float] | None:
        """Seconds since the first steps: of wall time, and how long the training thread ran, and waited for a CPU."""
        times = cpu_times_s(self.training_thread)
        if times is None or not self.steps:
            return None
        now = time.monotonic(), *times
        self._first_times = first = self._first_times or now
        return now[0] - first[0], now[1] - first[1], now[2] - first[2]

    def _highest_peak(self, now_bytes: int | None) -> int | None:
        """The highest peak so far: loops that print the peak of each epoch reset torch's."""
        if now_bytes is not None:
            self._vram_peak_bytes = max(now_bytes, self._vram_peak_bytes or 0)
        return self._vram_peak_bytes

    @property
    def compiled(self) -> bool:
        """Whether torch.compile has compiled anything."""
        dynamo = sys.modules.get("torch._dynamo.utils")
        return dynamo is not None and bool(dynamo.counters["stats"].get("unique_graphs", 0))

    def _tf32(self) -> bool | None:
        try:
            return bool(self._torch.get_float32_matmul_precision() != "highest")
        except RuntimeError:  # torch's old and new ways to set this were mixed
            return None

    def _gpu_uuid(self, cuda: Any) -> str | None:
        if cuda is None:
            return None
        uuid = getattr(cuda.get_device_properties(self.gpu), "uuid", None)
        return None if uuid is None else f"GPU-{uuid}"


def _name_of_group(distributed: Any, world_size: int) -> str:
    """A name that all ranks of the process group share: the first to ask sets it in the group's own store.

    That takes two messages to the store and waits for no other rank. A launcher may keep its store when it restarts the
    ranks: those that come after a whole group of this size belong to the next one. (The launcher's count of restarts
    does not help: each node counts its own.)
    """
    try:
        keys = distributed.distributed_c10d._get_default_store()
        name = keys.compare_set("fulltilt/group", "", uuid.uuid4().hex[:12]).decode()
        place = keys.add(f"fulltilt/ranks/{world_size}", 1)
        return f"{name}.{world_size}.{(place - 1) // world_size}"
    except Exception:  # a backend without a store
        return ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))


def _number_in(variable: str, otherwise: int) -> int:
    value = os.environ.get(variable, "")
    return int(value) if value.isdigit() else otherwise
