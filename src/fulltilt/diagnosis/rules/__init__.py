"""One pure function for each finding code, named like it.

Each takes the evidence and returns a Finding, an Abstention that says what evidence it lacks, or None when it looked
and found nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from fulltilt.diagnosis.evidence import Evidence
from fulltilt.diagnosis.findings import Judgement
from fulltilt.diagnosis.rules import data_loading, gpu, machine, ranks, training_loop
from fulltilt.diagnosis.rules.live_tuning import as_measured
from fulltilt.records import Abstention, FindingCode

Rule = Callable[[Evidence], Judgement]

# Data loading first, then copies, GPU, training loop, machine and ranks. The order also breaks ties between findings.
RULES: tuple[Rule, ...] = (
    data_loading.input_serial,
    data_loading.input_cpu_bound,
    data_loading.slow_storage,
    data_loading.input_io_bound,
    data_loading.input_handover,
    data_loading.epoch_restart,
    data_loading.dataset_pickled,
    gpu.transfer_blocking,
    gpu.sync_point,
    gpu.launch_bound,
    gpu.batch_too_small,
    gpu.precision_unused,
    gpu.free_switches,
    gpu.padding_waste,
    training_loop.slowing_down,
    training_loop.host_code,
    training_loop.recompiling,
    training_loop.gc_pauses,
    training_loop.validation_heavy,
    training_loop.checkpoint_stall,
    machine.memory_pressure,
    machine.worker_memory_growth,
    machine.cpu_affinity,
    machine.launch_contended,
    machine.cpu_oversubscribed,
    data_loading.shm_small,
    gpu.throttled,
    gpu.gpu_shared,
    ranks.straggler,
    ranks.communication_bound,
    ranks.find_unused_parameters,
    gpu.compute_bound,
)

# These judge what only a GPU has.
_ON_GPU: tuple[Rule, ...] = (
    gpu.transfer_blocking,
    gpu.sync_point,
    gpu.launch_bound,
    gpu.batch_too_small,
    gpu.precision_unused,
    gpu.free_switches,
    machine.launch_contended,
    gpu.throttled,
    gpu.gpu_shared,
)
# These judge the machine, so they need no training: memory may be why there was none.
_WITHOUT_TRAINING: tuple[Rule, ...] = (
    machine.memory_pressure,
    data_loading.shm_small,
    gpu.throttled,
    gpu.gpu_shared,
)


def judge(evidence: Evidence) -> list[Judgement]:
    """What every rule says. Without training, or with too little of it, the rules about training abstain."""
    lacks = "a training step" if evidence.throughput.steps == 0 else "a longer run" if evidence.too_short else None
    judgements: list[Judgement] = []
    for rule in RULES:
        if lacks is not None and rule not in _WITHOUT_TRAINING:
            judgements.append(Abstention(code_of(rule), lacks))
        elif evidence.on_gpu or rule not in _ON_GPU:
            judgements.append(as_measured(evidence, rule(evidence)))
    return judgements


def code_of(rule: Rule) -> FindingCode:
    """The finding code of a rule."""
    return cast(FindingCode, rule.__name__)
