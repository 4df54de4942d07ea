"""All of Fulltilt's data as frozen records. Standard library only, so that every package may import this one.

Names end in their unit. ``None`` means not measured; ``0.0`` means measured and zero. Points in time (``t_s``,
``t0_s``) are seconds since the start of the run.
"""

# Each name is imported as itself, which says that it is exported.
from fulltilt.records.diagnosis import Abstention as Abstention
from fulltilt.records.diagnosis import Ceilings as Ceilings
from fulltilt.records.diagnosis import CheckLine as CheckLine
from fulltilt.records.diagnosis import Diagnosis as Diagnosis
from fulltilt.records.diagnosis import Finding as Finding
from fulltilt.records.diagnosis import FindingCode as FindingCode
from fulltilt.records.diagnosis import GpuStep as GpuStep
from fulltilt.records.diagnosis import GpuSummary as GpuSummary
from fulltilt.records.diagnosis import JobSummary as JobSummary
from fulltilt.records.diagnosis import Ledger as Ledger
from fulltilt.records.diagnosis import RankSummary as RankSummary
from fulltilt.records.diagnosis import Throughput as Throughput
from fulltilt.records.diagnosis import Utilisation as Utilisation
from fulltilt.records.diagnosis import Verdict as Verdict
from fulltilt.records.machine import CpuCapacity as CpuCapacity
from fulltilt.records.machine import GpuProcess as GpuProcess
from fulltilt.records.machine import GpuReading as GpuReading
from fulltilt.records.machine import HostReading as HostReading
from fulltilt.records.machine import JobProcess as JobProcess
from fulltilt.records.machine import Machine as Machine
from fulltilt.records.machine import Sample as Sample
from fulltilt.records.machine import StorageReading as StorageReading
from fulltilt.records.run import BUCKETS as BUCKETS
from fulltilt.records.run import MOST_OF_A_SETTING as MOST_OF_A_SETTING
from fulltilt.records.run import SCHEMA_VERSION as SCHEMA_VERSION
from fulltilt.records.run import Buckets as Buckets
from fulltilt.records.run import CommunicationRecord as CommunicationRecord
from fulltilt.records.run import CompileRecord as CompileRecord
from fulltilt.records.run import DeepRecord as DeepRecord
from fulltilt.records.run import GarbageRecord as GarbageRecord
from fulltilt.records.run import HotLine as HotLine
from fulltilt.records.run import KernelRecord as KernelRecord
from fulltilt.records.run import LiveMove as LiveMove
from fulltilt.records.run import LiveRecord as LiveRecord
from fulltilt.records.run import LoaderRecord as LoaderRecord
from fulltilt.records.run import MemoryGrowthRecord as MemoryGrowthRecord
from fulltilt.records.run import MemoryRecord as MemoryRecord
from fulltilt.records.run import Phases as Phases
from fulltilt.records.run import PrecisionRecord as PrecisionRecord
from fulltilt.records.run import RankRecord as RankRecord
from fulltilt.records.run import Run as Run
from fulltilt.records.run import RunRecord as RunRecord
from fulltilt.records.run import Settings as Settings
from fulltilt.records.run import Span as Span
from fulltilt.records.run import Task as Task
from fulltilt.records.run import ThreadRecord as ThreadRecord
from fulltilt.records.run import TransferRecord as TransferRecord
from fulltilt.records.run import Trial as Trial
from fulltilt.records.run import UnusedSearchRecord as UnusedSearchRecord
from fulltilt.records.run import WorkerRecord as WorkerRecord
