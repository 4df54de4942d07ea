"""What Fulltilt knows, as frozen records. Standard library only, so that every floor may import this one.

Units stand in the names. ``None`` means not measured; ``0.0`` means measured and zero.
Times ending in ``_s`` that name a moment (``t_s``, ``t0_s``) are seconds since the start of the run.
"""

from __future__ import annotations

from fulltilt.records.answer import (
    Abstention,
    Ceilings,
    CheckLine,
    Diagnosis,
    Finding,
    FindingCode,
    GpuSummary,
    Ledger,
    RankSummary,
    Throughput,
    Verdict,
)
from fulltilt.records.job import (
    CommunicationRecord,
    DeepRecord,
    LoaderRecord,
    MemoryRecord,
    PrecisionRecord,
    RankRecord,
    TransferRecord,
    WorkerRecord,
)
from fulltilt.records.machine import (
    CpuCapacity,
    GpuProcess,
    GpuReading,
    HostReading,
    JobProcess,
    Machine,
    Sample,
    StorageReading,
)
from fulltilt.records.run import SCHEMA_VERSION, Run, RunRecord
from fulltilt.records.spans import BUCKETS, Buckets, HotLine, Phases, Span
from fulltilt.records.tuning import MOST_OF_A_SETTING, LiveMove, LiveRecord, Settings, Trial

__all__ = [
    "BUCKETS",
    "MOST_OF_A_SETTING",
    "SCHEMA_VERSION",
    "Abstention",
    "Buckets",
    "Ceilings",
    "CheckLine",
    "CommunicationRecord",
    "CpuCapacity",
    "DeepRecord",
    "Diagnosis",
    "Finding",
    "FindingCode",
    "GpuProcess",
    "GpuReading",
    "GpuSummary",
    "HostReading",
    "HotLine",
    "JobProcess",
    "Ledger",
    "LiveMove",
    "LiveRecord",
    "LoaderRecord",
    "Machine",
    "MemoryRecord",
    "Phases",
    "PrecisionRecord",
    "RankRecord",
    "RankSummary",
    "Run",
    "RunRecord",
    "Sample",
    "Settings",
    "Span",
    "StorageReading",
    "Throughput",
    "TransferRecord",
    "Trial",
    "Verdict",
    "WorkerRecord",
]
