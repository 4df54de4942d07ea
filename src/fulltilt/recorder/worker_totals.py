"""What the workers of a loader told of themselves, added up."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from fulltilt.recorder.lines import LineTimes
from fulltilt.recorder.worker_tap import WorkerMessage
from fulltilt.records import WorkerRecord


@dataclass
class WorkerTotals:
    """What the workers of one loader told so far."""

    pids: set[int] = field(default_factory=set)
    batches: int = 0
    fetch_s: float = 0.0
    fetch_cpu_s: float = 0.0
    cpu_wait_s: float | None = 0.0
    idle_s: float = 0.0
    process_cpu_s: float = 0.0
    read_bytes: dict[int, int] = field(default_factory=dict)
    pss_bytes: dict[int, int] = field(default_factory=dict)
    lines: LineTimes = field(default_factory=LineTimes)

    def add(self, message: WorkerMessage) -> None:
        """Take one message of a worker."""
        self.pids.add(message.pid)
        self.batches += message.batches
        self.fetch_s += message.fetch_s
        self.fetch_cpu_s += message.fetch_cpu_s
        self.idle_s += message.idle_s
        self.process_cpu_s += message.process_cpu_s
        waited = message.cpu_wait_s
        self.cpu_wait_s = None if waited is None or self.cpu_wait_s is None else self.cpu_wait_s + waited
        if message.read_bytes is not None:
            self.read_bytes[message.pid] = message.read_bytes
        if message.pss_bytes is not None:
            self.pss_bytes[message.pid] = max(message.pss_bytes, self.pss_bytes.get(message.pid, 0))
        self.lines.merge(message.lines)

    def record(self, loader_id: int) -> WorkerRecord:
        """The totals as a record."""
        return WorkerRecord(
            loader_id=loader_id,
            processes=len(self.pids),
            batches=self.batches,
            fetch_s=self.fetch_s,
            fetch_cpu_s=self.fetch_cpu_s,
            cpu_wait_s=self.cpu_wait_s,
            idle_s=self.idle_s,
            process_cpu_s=self.process_cpu_s,
            read_bytes=sum(self.read_bytes.values()) if self.read_bytes else None,
            lines=self.lines.top(),
            pss_bytes=round(statistics.mean(self.pss_bytes.values())) if self.pss_bytes else None,
        )
