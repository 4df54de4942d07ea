"""Several ranks: which one is late, and what exchanging gradients costs."""

from __future__ import annotations

from statistics import fmean

from fulltilt.diagnosis.evidence import Evidence
from fulltilt.diagnosis.findings import BUCKET_WORDS, Judgement, at, found, line_cost, time_spent
from fulltilt.diagnosis.predicted_gain import by_removing, share_left
from fulltilt.diagnosis.stragglers import LEAST_EVENTS
from fulltilt.diagnosis.thresholds import THRESHOLDS
from fulltilt.figures import count, percent, seconds
from fulltilt.records import Abstention, FindingCode, RankSummary

_ADVICE = {
    "data_wait_s": "give it the same storage, CPUs and workers as the others, and data that costs as much to load",
    "compute_s": "balance the batches (equal lengths and sizes on every rank); where they are even, check its clock",
    "host_code_s": "move what only it does between steps (logging, plotting) to the end of the epoch or a thread",
    "checkpoint_s": "save in the background (torch.distributed.checkpoint.async_save)",
    "validation_s": "divide validation among all ranks",
}

# Work that goes away, or is slow on one rank, instead of being divided among all.
_NOT_DIVIDED = ("data_wait_s", "host_code_s", "checkpoint_s")

_LESS_GATHERING = (
    "Gather less: reshard_after_forward=False halves the gathering where the parameters fit; fully_shard each block of "
    "the model; gather in bfloat16 (MixedPrecisionPolicy(param_dtype=torch.bfloat16)); or take a larger batch. Where "
    "the model fits on one GPU, use DistributedDataParallel."
)


def straggler(evidence: Evidence) -> Judgement:
    """One rank needs longer for its own work, and the others wait for it at every exchange.

    Or the late rank changes from step to step, since batches take unevenly long to load.
    """
    if lacking := _lacking(evidence, "straggler"):
        return lacking
    if len(evidence.ranks) < 2:
        return None
    steps = evidence.rank_steps
    if steps is None or len(steps.windows) < LEAST_EVENTS:  # too coarse to compare step by step
        late = [rank for rank in evidence.ranks if rank.slowest]
    else:
        late = [evidence.ranks[place] for place in steps.steady()]
    others = [rank for rank in evidence.ranks if rank not in late]
    if not late or not others:
        return _uneven(evidence)
    slowest = max(late, key=lambda rank: rank.own_work_s)
    waits_s = fmean(min(max(slowest.own_work_s - r.own_work_s, 0.0), r.buckets.communication_s) for r in others)
    share = evidence.share(waits_s)
    if share < THRESHOLDS.straggler_share:
        return None
    cause, excess_s = _what_differs(slowest, others)
    who = _who(evidence, late)
    facts = [
        f"for {percent(share)} of the time after start-up the other ranks wait for {who}",
        f"it works {seconds(evidence.per_step(slowest.own_work_s))} a step, the others "
        f"{seconds(evidence.per_step(fmean(rank.own_work_s for rank in others)))}",
        f"{BUCKET_WORDS[cause]} takes {seconds(evidence.per_step(excess_s))} a step more on rank {slowest.rank}",
    ]
    became_slow = slowest.own_past_speed is not None and slowest.own_past_speed < THRESHOLDS.slowed_down
    if became_slow:
        facts.append(f"it has become slower: {percent(slowest.own_past_speed or 0.0)} of its speed in the first steps")
    record = next((rank for rank in evidence.run.ranks if rank.rank == slowest.rank), evidence.rank)
    lines = sorted(record.host_lines, key=lambda line: -line.seconds) if cause == "host_code_s" else []
    facts += [line_cost(line) for line in lines[:1]]
    where = lines[0].where if lines else None
    fix = f"Look at {who}{at(where)}: {_ADVICE.get(cause, 'give it as much work as the others')}."
    slow_machine = became_slow or len(late) > 1 or evidence.invalid_because is not None
    if cause not in _NOT_DIVIDED and not slow_machine:
        # What the late rank no longer does, the others do.
        even_s = fmean(rank.own_work_s for rank in evidence.ranks)
        facts.append(f"evenly divided, each rank would work {seconds(evidence.per_step(even_s))} a step")
        share = evidence.share(min(slowest.own_work_s - even_s, waits_s))
    return found(evidence, "straggler", waits_s, facts, fix, where, by_removing(share))


def _uneven(evidence: Evidence) -> Judgement:
    """A different rank is late each time, since it waited longer for its data than the others."""
    steps = evidence.rank_steps
    if steps is None or len(steps.events) < LEAST_EVENTS or steps.steady():
        return None
    late_s = sum(min(event.data_wait_s, event.late_s) for event in steps.events)
    # Ranks that exchange nothing do not wait for each other.
    waits_s = min(late_s, max(rank.buckets.communication_s for rank in evidence.ranks))
    share = evidence.share(waits_s)
    if share < THRESHOLDS.wandering_share or late_s < steps.late_s / 2:
        return None
    often = sorted(evidence.ranks, key=lambda rank: -(rank.last_share or 0.0))[:3]
    facts = [
        f"for {percent(share)} of the time after start-up all ranks wait for the data of one, not always the same",
        "last most often: " + ", ".join(f"rank {rank.rank} ({percent(rank.last_share or 0.0)})" for rank in often),
    ]
    fix = (
        "No single rank is slow: some batches take longer to load than others. Even that out with more workers, a "
        "larger prefetch_factor, or batches of equal cost on all ranks."
    )
    return found(evidence, "straggler", waits_s, facts, fix, None, by_removing(share))


def _who(evidence: Evidence, late: list[RankSummary]) -> str:
    """``rank 3``, ``rank 3 on gpu02`` where there are several machines, or ``gpu02`` with all its ranks."""
    several = len({rank.hostname for rank in evidence.ranks}) > 1
    if len(late) > 1:
        return f"{late[0].hostname} (ranks {', '.join(str(rank.rank) for rank in late)})"
    return f"rank {late[0].rank} on {late[0].hostname}" if several else f"rank {late[0].rank}"


def communication_bound(evidence: Evidence) -> Judgement:
    """Exchanging gradients takes longer than the backward pass can hide."""
    if lacking := _lacking(evidence, "communication_bound"):
        return lacking
    # The slowest rank waits for no other: its time in the exchange is the exchange itself.
    exposed_s = min((rank.buckets.communication_s for rank in evidence.ranks), default=0.0)
    share = evidence.share(exposed_s)
    if share < THRESHOLDS.communication_share:
        return None
    sharded = evidence.rank.sharded
    what = "gathering parameters" if sharded else "exchanging gradients (not overlapped with backward)"
    facts = [time_spent(evidence, what, exposed_s)]
    record = evidence.rank.communication
    if record and record.communication_s is not None and record.overlapped_s is not None:
        facts.append(
            f"of {seconds(record.communication_s)} of exchange a step, {seconds(record.overlapped_s)} are overlapped"
        )
    machines = {rank.hostname for rank in evidence.run.ranks}
    facts.append(f"{count('rank', evidence.rank.world_size)} on {count('machine', len(machines))}")
    if sharded:
        fix = _LESS_GATHERING
    elif record:
        fix = (
            "Exchange less often: accumulate gradients over k batches under model.no_sync() "
            f"(k = 4: {percent(share)} → {percent(share_left(share, 4))}). Or exchange less: model.register_comm_hook("
            "None, torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook) halves the bytes."
        )
    else:
        fix = (
            "Exchange less often, in one tensor instead of one call for each parameter, or in bfloat16. "
            "DistributedDataParallel overlaps the exchange with backward."
        )
    return found(evidence, "communication_bound", exposed_s, facts, fix, None, by_removing(share * 0.75))


def find_unused_parameters(evidence: Evidence) -> Judgement:
    """DistributedDataParallel searches each step for parameters without a gradient, and there are none."""
    searches = [rank.unused_search for rank in evidence.run.ranks if rank.unused_search is not None]
    asked = sum(search.asked for search in searches)
    if not searches or any(search.unused_bytes for search in searches):
        return None
    if asked < THRESHOLDS.searches_in_vain:
        return Abstention("find_unused_parameters", "more steps in which DistributedDataParallel searched")
    where = searches[0].where
    facts = [
        f"find_unused_parameters=True{at(where)}: DistributedDataParallel searches each step for unused parameters, "
        f"and found none in {count('step', asked)} that were checked"
    ]
    fix = (
        f"Leave find_unused_parameters out{at(where)}, unless some steps skip a part of the model (Hugging Face: "
        'ddp_find_unused_parameters=False; Lightning: strategy="ddp"). It saves a walk through the graph in each '
        "step, usually a few per cent (not measured here)."
    )
    return found(evidence, "find_unused_parameters", 0.0, facts, fix, where, None, "info")


def _lacking(evidence: Evidence, code: FindingCode) -> Abstention | None:
    """What is missing to compare ranks; None when nothing is, or the job has a single rank."""
    world_size = max((rank.world_size for rank in evidence.run.ranks), default=1)
    if world_size > len(evidence.ranks):
        return Abstention(code, f"the records of all {world_size} ranks (there are {len(evidence.ranks)})")
    measured = any(rank.communication for rank in evidence.run.ranks) or any(
        rank.buckets.communication_s > 0 for rank in evidence.ranks
    )
    if world_size > 1 and not measured:
        return Abstention(code, "the time that the ranks spent exchanging gradients")
    return None


def _what_differs(slowest: RankSummary, others: list[RankSummary]) -> tuple[str, float]:
    """The bucket in which the slowest rank exceeds the others most, and by how many seconds."""

    def excess_s(bucket: str) -> float:
        own: float = getattr(slowest.buckets, bucket)
        return own - fmean(getattr(rank.buckets, bucket) for rank in others)

    worst = max(
        (bucket for bucket in BUCKET_WORDS if bucket not in ("communication_s", "unattributed_s")), key=excess_s
    )
    return worst, excess_s(worst)
