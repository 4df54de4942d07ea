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
from fulltilt.diagnosis.rules import data_loading, gpu, machine, ranks, training_loop, worker_overhead
from fulltilt.diagnosis.rules.live_tuning import as_measured
from fulltilt.records import Abstention, Finding, FindingCode


@dataclass(frozen=True, slots=True)
class Rule:
    """What judges, the title of its findings, and the sentence that follows it in the verdict.

    ``{share}`` is of the time after start-up. ``{win}`` is an upper bound: only the time that is counted goes away.
    ``{guess}`` is not: the cause may slow other things, or not go away altogether.
    """

    judge: Callable[[Evidence], Judgement]
    title: str
    sentence: str | None

    @property
    def code(self) -> FindingCode:
        """The finding code of the rule."""
        return cast(FindingCode, self.judge.__name__)


_DATA_WAIT = "{trainee} waits for data {share}{gain}"
# Data loading first, then copies, GPU, training loop, machine and ranks. The order also breaks ties between findings.
RULES: tuple[Rule, ...] = (
    Rule(data_loading.input_serial, "Data loading: no workers", _DATA_WAIT),
    Rule(data_loading.input_cpu_bound, "Data loading: CPU-bound", _DATA_WAIT),
    Rule(data_loading.slow_storage, "Data loading: slow storage", "{trainee} waits for data {share}{win}"),
    Rule(data_loading.input_io_bound, "Data loading: I/O-bound", _DATA_WAIT),
    Rule(worker_overhead.input_handover, "Data loading: slow hand-over from the workers", _DATA_WAIT),
    Rule(worker_overhead.epoch_restart, "Epoch restarts", "restarting the loader for each epoch takes {share}{win}"),
    Rule(worker_overhead.dataset_pickled, "Data set pickled to every worker", "{fact}{win}"),
    Rule(
        gpu.transfer_blocking,
        "Blocking copies to the GPU",
        "the GPU idles {share} while batches are copied{place}{win}",
    ),
    Rule(gpu.sync_point, "Host waits for the GPU", "the GPU idles {share} because the script waits for it{place}{win}"),
    Rule(gpu.launch_bound, "Launch-bound", "the GPU idles between kernels {share}{win}"),
    Rule(gpu.batch_too_small, "Batch too small", "it does not fill the GPU{win}"),
    Rule(gpu.precision_unused, "Tensor cores unused", "the model computes in float32{guess}"),
    Rule(gpu.free_switches, "PyTorch performance flags unused", "{fact}{win}"),
    Rule(gpu.padding_waste, "Padding", "{fact}{win}"),
    Rule(training_loop.slowing_down, "Slowing down", "{fact}{place}{guess}"),
    Rule(
        training_loop.host_code, "Python code in the training loop", "the script's own code takes {share}{place}{win}"
    ),
    Rule(training_loop.recompiling, "Recompilation", "{fact}{place}{win}"),
    Rule(training_loop.gc_pauses, "Garbage collection", "it stops the training {share}{place}{win}"),
    Rule(training_loop.validation_heavy, "Validation", "it takes {share}{most}"),
    Rule(training_loop.checkpoint_stall, "Blocking checkpoints", "saving stops the training {share}{place}{most}"),
    Rule(machine.memory_pressure, "Memory pressure", "{fact}"),
    Rule(machine.worker_memory_growth, "Worker memory growth", "{fact}"),
    Rule(machine.cpu_affinity, "CPU affinity", "{fact}{guess}"),
    Rule(machine.launch_contended, "No CPU to launch kernels", "{fact}{guess}"),
    Rule(machine.gil_contended, "GIL contention", "{fact}{guess}"),
    Rule(machine.cpu_oversubscribed, "CPU oversubscribed", "{fact} and slow each other down{guess}"),
    Rule(worker_overhead.shm_small, "Shared memory too small", "{fact}"),
    Rule(gpu.throttled, "GPU throttled", "{fact}{win}"),
    Rule(gpu.gpu_shared, "GPU shared", "{fact}{guess}"),
    Rule(ranks.straggler, "Straggler", "{fact}{win}"),
    Rule(ranks.communication_bound, "Communication-bound", "{exchange} takes {share}{guess}"),
    Rule(ranks.find_unused_parameters, "Needless search for unused parameters", "{fact}"),
    Rule(gpu.compute_bound, "Compute-bound", None),
)
# Rules about what only a GPU has, and those that also judge a job that has not trained.
_ON_GPU = (
    *("transfer_blocking", "sync_point", "launch_bound", "batch_too_small", "precision_unused", "free_switches"),
    *("launch_contended", "throttled", "gpu_shared"),
)
_OF_MACHINE = ("memory_pressure", "shm_small", "throttled", "gpu_shared")


def judge(evidence: Evidence) -> list[Judgement]:
    """What every rule says. Without training, or with too little of it, the rules about training abstain."""
    lacks = "a training step" if evidence.throughput.steps == 0 else "a longer run" if evidence.too_short else None
    judgements: list[Judgement] = []
    for rule in RULES:
        if lacks is not None and rule.code not in _OF_MACHINE:
            judgements.append(Abstention(rule.code, lacks))
        elif evidence.on_gpu or rule.code not in _ON_GPU:
            judgements.append(as_measured(evidence, rule.judge(evidence)))
    # A slow rank's line, as a mean over all ranks, says nothing more.
    findings = [one for one in judgements if isinstance(one, Finding) and one.where]
    late = [one.where for one in findings if one.code == "straggler"]
    repeated = [one for one in findings if one.code == "host_code" and one.where in late]
    return [one for one in judgements if one not in repeated]
