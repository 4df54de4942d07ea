"""One pure function for each finding code, named like it.

Each takes the evidence and returns a Finding, an Abstention that says what evidence it lacks, or None when it looked
and found nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from fulltilt.diagnosis.evidence import Evidence
from fulltilt.diagnosis.findings import Judgement
from fulltilt.diagnosis.rules.data_loading import (
    epoch_restart,
    input_cpu_bound,
    input_handover,
    input_io_bound,
    input_serial,
    shm_small,
)
from fulltilt.diagnosis.rules.gpu import (
    batch_too_small,
    compute_bound,
    launch_bound,
    padding_waste,
    precision_unused,
    sync_point,
    transfer_blocking,
)
from fulltilt.diagnosis.rules.host import checkpoint_stall, host_code, recompiling, validation_heavy
from fulltilt.diagnosis.rules.live_tuning import as_measured
from fulltilt.diagnosis.rules.machine import cpu_oversubscribed, gpu_shared, memory_pressure, throttled
from fulltilt.diagnosis.rules.ranks import communication_bound, straggler
from fulltilt.records import Abstention, FindingCode

Rule = Callable[[Evidence], Judgement]

# Data loading first, then copies, GPU, host, machine and ranks. The order also breaks ties between findings.
RULES: tuple[Rule, ...] = (
    input_serial,
    input_cpu_bound,
    input_io_bound,
    input_handover,
    epoch_restart,
    transfer_blocking,
    sync_point,
    launch_bound,
    batch_too_small,
    precision_unused,
    padding_waste,
    host_code,
    recompiling,
    validation_heavy,
    checkpoint_stall,
    memory_pressure,
    cpu_oversubscribed,
    shm_small,
    throttled,
    gpu_shared,
    straggler,
    communication_bound,
    compute_bound,
)

# These judge the machine, so they need no training: memory may be why there was none.
_WITHOUT_TRAINING: tuple[Rule, ...] = (memory_pressure, shm_small, throttled, gpu_shared)


def judge(evidence: Evidence) -> list[Judgement]:
    """What every rule says. Without training, or with too little of it, the rules about training abstain."""
    lacks = "a training step" if evidence.throughput.steps == 0 else "a longer run" if evidence.too_short else None
    return [
        as_measured(evidence, rule(evidence))
        if lacks is None or rule in _WITHOUT_TRAINING
        else Abstention(code_of(rule), lacks)
        for rule in RULES
    ]


def code_of(rule: Rule) -> FindingCode:
    """The finding code of a rule."""
    return cast(FindingCode, rule.__name__)
