"""How many workers the training needs, how many the CPUs allow, and what they would win."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fulltilt.diagnosis.evidence import Evidence, training_loaders
from fulltilt.diagnosis.loader_bottleneck import Supply
from fulltilt.diagnosis.predicted_gain import Gain, amdahl, by_removing, by_speeding_up, gain
from fulltilt.diagnosis.thresholds import THRESHOLDS
from fulltilt.records import Abstention, FindingCode


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """``needed`` workers would hide loading altogether, ``allowed`` is what the CPUs can run; ``advised`` follows both.

    ``crowds``: the job keeps its CPUs busy already.
    """

    now: int
    needed: int
    allowed: int
    advised: int
    gain: Gain
    crowds: bool = False

    @property
    def raises(self) -> bool:
        """Whether more workers than now are advised."""
        return self.advised > self.now


def plan_workers(evidence: Evidence) -> WorkerPlan | None:
    """The workers to use, by the loader's measured costs; None where they were not measured.

    None also for one of several training loaders without workers: its own rate cannot be compared with the job's.
    """
    supply, rate = evidence.supply, _delivered_by_loader(evidence)
    if supply is None or not rate or (supply.workers == 0 and _several_loaders(evidence)):
        return None
    unhindered = amdahl(evidence.waiting_share)
    needed = math.ceil(unhindered * rate / supply.worker_samples_per_s * THRESHOLDS.worker_headroom)
    allowed = allowed_workers(evidence, supply, rate)
    advised = min(max(needed, supply.workers + 1), allowed)
    if advised <= supply.workers:
        return WorkerPlan(supply.workers, needed, allowed, supply.workers, (1.0, 1.0))
    if supply.workers == 0:
        high = advised * supply.worker_samples_per_s / rate
        low = min(_first_workers_rate(evidence, supply, rate, advised) / rate, high)
    else:
        high = advised / supply.workers
        low = 1 + (high - 1) * THRESHOLDS.scaling_low
    # The most and the fewest CPUs that training may use while it does not wait.
    threads = 1.0 if evidence.on_gpu else max(min(evidence.rank.torch_threads or 1, evidence.usable_cpus), 1.0)
    cautious, hopeful = (full_cpu_rate(evidence, supply, rate, taken) / rate for taken in (threads, 1.0))
    # Whatever the error of the rates: no loader wins more than the data wait.
    least, most = min(low, cautious) * (1 - THRESHOLDS.rate_error), min(high, hopeful) * (1 + THRESHOLDS.rate_error)
    crowds = False
    if (room := _cpu_room(evidence, supply)) is not None:
        most = min(most, room * (1 + THRESHOLDS.rate_error))
        # The threads of an operation wait for each other: a worker that takes the CPU of one delays all.
        crowds = room < THRESHOLDS.cpu_room
        least = 1.0 if crowds else least
    predicted = by_speeding_up(evidence.share(evidence.drawing_s), *gain(least, most, cap=unhindered))
    return WorkerPlan(supply.workers, needed, allowed, advised, predicted, crowds)


def _cpu_room(evidence: Evidence, supply: Supply) -> float | None:
    """Usable CPUs over those that the job keeps busy already; None where CPUs do not set its rate."""
    used_pct, alone = evidence.host.tree_cpu_pct, len(evidence.run.ranks) == 1
    if evidence.on_gpu or supply.waits or not used_pct or not alone:
        return None
    return max(100 * evidence.usable_cpus / used_pct, 1.0)


def _delivered_by_loader(evidence: Evidence) -> float | None:
    """Samples a second that the loader itself delivers, without those of other loaders."""
    loader, spans = evidence.loader, evidence.run.spans
    drawn = sum(span.batches for own in spans for span in own) / max(len(spans), 1)
    # Of loaders that are used one after the other, each delivers all samples in its turn.
    if loader is None or not _several_loaders(evidence) or 2 * loader.batches < drawn:
        return evidence.delivered_samples_per_s
    return loader.samples / evidence.drawing_s if loader.samples and evidence.drawing_s > 0 else None


def unplanned_workers(evidence: Evidence) -> int:
    """How many workers to try where there is no plan: one per CPU, or more where fetching mostly waits."""
    supply = evidence.supply
    if supply is not None and supply.waits:
        return max(round(THRESHOLDS.waiting_workers_per_cpu * evidence.usable_cpus), 1)
    return max(int(evidence.usable_cpus) - 1, 1)


def _first_workers_rate(evidence: Evidence, supply: Supply, rate: float, workers: int) -> float:
    """A cautious estimate of samples a second with a job's first workers, which bring costs of their own.

    Batches are handed over, and each pass begins with an empty queue; after a pass that was left early, the workers
    first finish what they had begun.
    """
    loader = evidence.loader
    # Workers slow each other down; on a full machine a single one and the training do, too.
    fills_cpus = workers + 1 >= evidence.usable_cpus and (supply.busy_share or 0.0) >= THRESHOLDS.cpu_bound_share
    scaling = THRESHOLDS.scaling_low if workers > 1 or fills_cpus else 1.0
    slowed_s = supply.batch_s / scaling
    training_s = supply.samples_per_batch * (1 - evidence.waiting_share) / rate
    beginning_s = 0.0
    if loader is not None and loader.passes > 0 and loader.batches > 0:
        each = loader.batches / loader.passes
        whole = -(-loader.dataset_len // loader.batch_size) if loader.dataset_len and loader.batch_size else each
        left_early = loader.passes > 1 and each < 0.9 * whole
        beginning_s = slowed_s * (1 + (2 if left_early else 0)) / each
    batch_s = max(slowed_s / workers, training_s + THRESHOLDS.handing_over_s) + beginning_s
    return supply.samples_per_batch / batch_s


def allowed_workers(evidence: Evidence, supply: Supply, rate: float) -> int:
    """How many such workers fill the CPUs of a rank beside the training.

    Workers that mostly wait take little CPU; of those at most ``waiting_workers_per_cpu`` are allowed.
    """
    alone_s = (supply.batch_s - supply.queue_s) / supply.samples_per_batch
    at_once = full_cpu_rate(evidence, supply, rate, threads=1.0) * alone_s
    most = THRESHOLDS.waiting_workers_per_cpu * evidence.usable_cpus
    return max(round(min(at_once, most)), 1)


def full_cpu_rate(evidence: Evidence, supply: Supply, rate: float, threads: float) -> float:
    """Samples a second at which the CPUs are full, if the training uses ``threads`` of them while it does not wait."""
    loading_cpu_s = max(supply.batch_cpu_s / supply.samples_per_batch, 1e-9)
    training_cpu_s = threads * (1 - evidence.waiting_share) / rate
    # Training that never waits uses no more than its threads, however fast the loader could be.
    return max(
        evidence.usable_cpus / (loading_cpu_s + training_cpu_s), (evidence.usable_cpus - threads) / loading_cpu_s
    )


def divided_among(share: float, workers: int) -> float:
    """The gain where this share of the time is divided among workers, and goes on beside the rest."""
    return 1 / max(share / max(workers, 1), 1 - share)


def unplanned_gain(evidence: Evidence, workers: int) -> Gain:
    """What the first workers win where there is no plan: they divide their loader's fetching, beside all else.

    So it is with several loaders, and with batches whose samples cannot be counted.
    """
    loader, supply = evidence.loader, evidence.supply
    low, high = gain_without_wait(evidence)
    if loader is None or loader.num_workers:
        return low, high
    most = divided_among(evidence.share(loader.wait_s), workers)
    room = _cpu_room(evidence, supply) if supply is not None else None
    return gain(low, min(high, most, room if room is not None else most))


def gain_without_wait(evidence: Evidence) -> Gain:
    """The gain if training waited half as long, or not at all; with several loaders the lower end is no gain."""
    return by_removing(evidence.data_wait_share, 0.0 if _several_loaders(evidence) else THRESHOLDS.recovered_low)


def _several_loaders(evidence: Evidence) -> bool:
    return len(training_loaders(evidence.rank)) > 1


def workers_unmeasured(evidence: Evidence, code: FindingCode) -> Abstention:
    """Training waits for workers, and too little is known of them to say why."""
    if evidence.workers is None:
        return Abstention(code, "the workers' own CPU time and waiting time")
    return Abstention(code, "how long the workers waited for a CPU")
