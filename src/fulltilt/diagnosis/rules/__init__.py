"""One pure function for each finding code, named like it.

Each takes the evidence and returns a Finding, an Abstention that says what evidence it lacks, or None when it looked
and found nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from fulltilt.diagnosis.evidence import Evidence
from fulltilt.diagnosis.findings import Judgement
from fulltilt.diagnosis.rules import data_loading, gpu, machine, ranks, training_loop
from fulltilt.diagnosis.rules.live_tuning import as_measured
from fulltilt.records import Abstention, Finding, FindingCode


@dataclass(frozen=True, slots=True)
class Rule:
    """``on_gpu``: it judges what only a GPU has. ``of_machine``: it judges a job that has not trained, too."""

    judge: Callable[[Evidence], Judgement]
    on_gpu: bool = False
    of_machine: bool = False

    @property
    def code(self) -> FindingCode:
        """The finding code of the rule."""
        return cast(FindingCode, self.judge.__name__)


# Data loading first, then copies, GPU, training loop, machine and ranks. The order also breaks ties between findings.
RULES: tuple[Rule, ...] = (
    Rule(data_loading.input_serial),
    Rule(data_loading.input_cpu_bound),
    Rule(data_loading.slow_storage),
    Rule(data_loading.input_io_bound),
    Rule(data_loading.input_handover),
    Rule(data_loading.epoch_restart),
    Rule(data_loading.dataset_pickled),
    Rule(gpu.transfer_blocking, on_gpu=True),
    Rule(gpu.sync_point, on_gpu=True),
    Rule(gpu.launch_bound, on_gpu=True),
    Rule(gpu.batch_too_small, on_gpu=True),
    Rule(gpu.precision_unused, on_gpu=True),
    Rule(gpu.free_switches, on_gpu=True),
    Rule(gpu.padding_waste),
    Rule(training_loop.slowing_down),
    Rule(training_loop.host_code),
    Rule(training_loop.recompiling),
    Rule(training_loop.gc_pauses),
    Rule(training_loop.validation_heavy),
    Rule(training_loop.checkpoint_stall),
    Rule(machine.memory_pressure, of_machine=True),
    Rule(machine.worker_memory_growth),
    Rule(machine.cpu_affinity),
    Rule(machine.launch_contended, on_gpu=True),
    Rule(machine.gil_contended),
    Rule(machine.cpu_oversubscribed),
    Rule(data_loading.shm_small, of_machine=True),
    Rule(gpu.throttled, on_gpu=True, of_machine=True),
    Rule(gpu.gpu_shared, on_gpu=True, of_machine=True),
    Rule(ranks.straggler),
    Rule(ranks.communication_bound),
    Rule(ranks.find_unused_parameters),
    Rule(gpu.compute_bound),
)


def judge(evidence: Evidence) -> list[Judgement]:
    """What every rule says. Without training, or with too little of it, the rules about training abstain."""
    lacks = "a training step" if evidence.throughput.steps == 0 else "a longer run" if evidence.too_short else None
    judgements: list[Judgement] = []
    for rule in RULES:
        if lacks is not None and not rule.of_machine:
            judgements.append(Abstention(rule.code, lacks))
        elif evidence.on_gpu or not rule.on_gpu:
            judgements.append(as_measured(evidence, rule.judge(evidence)))
    # A slow rank's line, as a mean over all ranks, says nothing more.
    findings = [one for one in judgements if isinstance(one, Finding) and one.where]
    late = [one.where for one in findings if one.code == "straggler"]
    repeated = [one for one in findings if one.code == "host_code" and one.where in late]
    return [one for one in judgements if one not in repeated]
