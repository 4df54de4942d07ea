"""How many workers would feed the training, how many the CPUs allow, and what that would win."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fulltilt.diagnose.evidence import Evidence
from fulltilt.diagnose.gains import Gain, amdahl, by_removing, gain
from fulltilt.diagnose.supply import Supply
from fulltilt.records import Abstention, FindingCode


@dataclass(frozen=True, slots=True)
class Staffing:
    """``needed`` workers would hide loading altogether; ``allowed`` is what the CPUs carry; ``advised`` obeys both."""

    now: int
    needed: int
    allowed: int
    advised: int
    gain: Gain

    @property
    def raises(self) -> bool:
        """Whether more workers than now are advised."""
        return self.advised > self.now


def plan_workers(evidence: Evidence) -> Staffing | None:
    """The workers to use with the loader's measured costs; None when they were not measured."""
    supply, rate = evidence.supply, evidence.delivered_samples_per_s
    if supply is None or not rate:
        return None
    limits = evidence.thresholds
    unhindered = amdahl(evidence.active_share(evidence.buckets.data_wait_s))
    needed = math.ceil(unhindered * rate / supply.worker_samples_per_s * limits.worker_headroom)
    allowed = allowed_workers(supply, evidence)
    # At 0 workers the first one takes loading off the training thread, so one is always worth advising.
    advised = max(min(max(needed, supply.workers + 1), allowed), 1)
    if advised <= supply.workers:
        return Staffing(supply.workers, needed, allowed, supply.workers, (1.0, 1.0))
    high = advised * supply.worker_samples_per_s / rate
    low = high * (limits.scaling_low if advised > 1 else 1.0)
    if supply.workers > 0:
        growth = advised / supply.workers
        low, high = 1 + (growth - 1) * limits.scaling_low, growth
    cautious, hopeful = _cpu_bounds(evidence, supply, rate)
    return Staffing(
        supply.workers, needed, allowed, advised, gain(min(low, cautious), min(high, hopeful), cap=unhindered)
    )


def allowed_workers(supply: Supply, evidence: Evidence) -> int:
    """How many such workers the usable CPUs of a rank carry, one CPU left to the training thread."""
    busy = supply.busy_share if supply.busy_share is not None else supply.batch_cpu_s / supply.batch_s
    most = evidence.thresholds.waiting_workers_per_cpu * evidence.usable_cpus
    free_cpus = max(evidence.usable_cpus - 1, 1.0)
    return max(math.floor(min(free_cpus / max(busy, 0.01), most)), 1)


def _cpu_bounds(evidence: Evidence, supply: Supply, rate: float) -> Gain:
    """The factors at which the CPUs are full: if compute uses all of torch's threads, and if it uses one."""
    loading_cpu_s = supply.batch_cpu_s / supply.samples_per_batch
    compute_s = threads = 0.0
    if not evidence.on_gpu and evidence.rank is not None:
        compute_s = evidence.buckets.compute_s / max(rate * evidence.active_s, 1e-9)
        threads = min(evidence.rank.torch_threads or 1, evidence.usable_cpus)
    factors = []
    for threads_used in (max(threads, 1.0), 1.0):
        cpu_s = loading_cpu_s + threads_used * compute_s
        factors.append(evidence.usable_cpus / cpu_s / rate if cpu_s > 0 else math.inf)
    return factors[0], factors[1]


def gain_without_wait(evidence: Evidence) -> Gain:
    """What training would win if it waited half as long for data, or not at all."""
    share = evidence.active_share(evidence.buckets.data_wait_s)
    return by_removing(share, evidence.thresholds.recovered_low)


def workers_unmeasured(evidence: Evidence, code: FindingCode) -> Abstention:
    """Training waits for workers of which too little is known to say why."""
    if evidence.workers is None:
        return Abstention(code, "the workers' own CPU time and waiting time")
    return Abstention(code, "how long the workers waited for a CPU")
