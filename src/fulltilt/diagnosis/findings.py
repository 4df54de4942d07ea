"""How findings are made and ordered: share, severity, and phrases that several rules use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from fulltilt.diagnosis.evidence import Evidence
from fulltilt.diagnosis.ledger import hung_stretch
from fulltilt.diagnosis.libraries import costly_call, keeps_workers, loader_call
from fulltilt.diagnosis.predicted_gain import Gain, amdahl, expected, gain
from fulltilt.diagnosis.thresholds import THRESHOLDS
from fulltilt.figures import number, percent, seconds, speedup
from fulltilt.records import Abstention, Finding, FindingCode, HotLine, LoaderRecord

# A rule finds its cause, lacks the evidence to judge, or finds nothing.
Judgement = Finding | Abstention | None
Severity = Literal["info", "warn", "severe"]

BUCKET_WORDS = {
    "data_wait_s": "waiting for data",
    "transfer_s": "copying to the GPU",
    "compute_s": "compute",
    "sync_s": "waiting for the GPU",
    "host_code_s": "the script's own code",
    "validation_s": "validation",
    "checkpoint_s": "saving",
    "epoch_turnover_s": "epoch restart",
    "communication_s": "the exchange between ranks",
    "unattributed_s": "unattributed time",
}


def found(
    evidence: Evidence,
    code: FindingCode,
    cost_s: float,
    facts: list[str],
    fix: str,
    where: str | None = None,
    gain: Gain | None = None,
    severity: Severity | None = None,
    title: str = "",
) -> Finding:
    """A finding that costs ``cost_s`` seconds; its severity follows from their share unless it is given."""
    share = evidence.share(cost_s)
    if severity is None:
        severity = (
            "severe" if share >= THRESHOLDS.severe_share else "warn" if share >= THRESHOLDS.warn_share else "info"
        )
    return Finding(code, share, severity, tuple(facts), where, fix, gain, title=title)


_FATAL = ("memory_pressure", "worker_memory_growth", "shm_small")


def ordered(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Largest predicted gain first; before it only a lack of memory, which may end the job; remarks come last."""

    def place(finding: Finding) -> tuple[int, float, float]:
        if finding.code in _FATAL and finding.severity == "severe":
            group = 0
        elif finding.code == "compute_bound":
            group = 2
        else:
            group = 3 if finding.severity == "info" else 1
        return group, -expected(finding.predicted_speedup), -finding.share

    return tuple(sorted(findings, key=place))


def time_spent(evidence: Evidence, what: str, cost_s: float) -> str:
    """``data wait takes 62 % of the time after start-up: 124 s, 15.5 ms a step``."""
    return (
        f"{what} takes {percent(evidence.share(cost_s))} of the time after start-up: "
        f"{seconds(cost_s)}, {seconds(evidence.per_step(cost_s))} a step"
    )


def waiting_for_data(
    evidence: Evidence,
    code: FindingCode,
    facts: list[str],
    fix: str,
    where: str | None,
    predicted: Gain | None = None,
    what: str = "waiting for data",
    title: str = "",
) -> Finding:
    """A finding that costs the data wait."""
    wait_s = evidence.buckets.data_wait_s
    facts = [time_spent(evidence, what, wait_s), *facts]
    return found(evidence, code, wait_s, facts, fix, where, predicted, title=title)


def hung_fetch(evidence: Evidence, loader: LoaderRecord, code: FindingCode) -> Finding | None:
    """The finding for a job that was stopped in a wait that never ended; None where other waits were longer."""
    hung = hung_stretch(evidence.run)
    in_vain_s = hung.buckets.data_wait_s if hung is not None else 0.0
    if in_vain_s <= THRESHOLDS.in_vain_share * evidence.buckets.data_wait_s:
        return None
    line = costliest_line(evidence)
    place = call_at(line) if line else f"the loader{at(loader.where)}"
    fix = f"Find out what {place} waited for: a lock, a service, a file system? More workers would wait as well."
    if loader.num_workers:
        fix += " With DataLoader(..., timeout=60) such a wait ends in an error."
    facts = [f"{seconds(in_vain_s)} of it is one wait that never ended"]
    title = "Data loading: a fetch that never returned"
    return waiting_for_data(evidence, code, facts, fix, line.where if line else loader.where, title=title)


WORKERS_SHARE_LOCK = "Data loading: workers wait for one lock"
OTHERS_TAKE_CPUS = (
    "Other processes on the machine take the CPUs: give the job CPUs of its own (a cgroup, Slurm's --cpus-per-task and "
    "--exclusive), or end them."
)


def neighbours(evidence: Evidence) -> list[str]:
    """A fact for what CPUs limit: other processes had a large part of them."""
    others = evidence.host.others_share
    if others < THRESHOLDS.others_share:
        return []
    return [f"other processes had {percent(others)} of the CPUs that the job may use, and none was free"]


def busy_thread(evidence: Evidence) -> tuple[str, str] | None:
    """The busiest Python thread besides the training thread, and a fact about it; None where none is busy."""
    thread = next(iter(evidence.busy_threads), None)
    if thread is None:
        return None
    named = f"thread {thread.name}" + (f" (mostly {thread.lines[0].where})" if thread.lines else "")
    fact = f"{named} runs for {percent(evidence.share(thread.cpu_s))} of the time, and only one thread has the GIL"
    return named, fact


def line_cost(line: HotLine, whole_s: float | None = None) -> str:
    """``71 % in decode, dataset.py:48``; without a whole, the seconds themselves."""
    cost = percent(min(line.seconds / whole_s, 1.0)) if whole_s else seconds(line.seconds)
    call = f" ({line.call})" if line.call else ""
    return f"{cost} in {line.function}, {line.where}{call}"


def costliest_lines(lines: Sequence[HotLine], cost_s: float) -> list[str]:
    """What the first three lines cost, without those that cost hardly anything of ``cost_s``.

    Lines are timed by stack samples, so that one may seem to cost a little more than ``cost_s``.
    """
    telling = [line for line in lines[:3] if line.seconds >= THRESHOLDS.telling_line_share * cost_s]
    return [line_cost(replace(line, seconds=min(line.seconds, cost_s))) for line in telling or lines[:1]]


def costliest_line(evidence: Evidence) -> HotLine | None:
    """The line, outside of torch and of Python itself, on which fetching spends most of its time."""
    lines = evidence.workers.lines if evidence.workers else ()
    others = (line for line in lines if not line.where.startswith(("torch/", "<frozen ")))
    return max(others, key=lambda line: line.seconds, default=None)


def fetching_line(evidence: Evidence) -> list[str]:
    """A fact about that line; none where no line was seen."""
    if evidence.workers is None or (line := costliest_line(evidence)) is None:
        return []
    return [f"of the workers' fetching, {line_cost(line, evidence.workers.fetch_s)}"]


def with_cheaper_call(
    evidence: Evidence, line: HotLine | None, whole_s: float, fix: str, predicted: Gain
) -> tuple[str, Gain]:
    """The fix and its gain, with advice on a library call that takes much of ``whole_s``, the time spent fetching."""
    known = costly_call(line) if line and line.seconds >= THRESHOLDS.guilty_function_share * whole_s else None
    if line is None or known is None:
        return fix, predicted
    advice = f"{call_at(line)} {known.does}: {known.instead}."
    # Other lines call the same library: a row is taken out of a table here, and its fields there. And samples of the
    # stack miss some of the time: of that which they saw, these lines had this part.
    lines = evidence.workers.lines if evidence.workers else (line,)
    same_s = sum(one.seconds for one in lines if costly_call(one) is known)
    seen_s = min(sum(one.seconds for one in lines), whole_s)
    without = amdahl(evidence.data_wait_share * min(same_s / max(seen_s, 1e-9), 1.0))
    if known.easy:
        return f"{advice} {fix}", gain(predicted[0], max(predicted[1], without))
    if without > predicted[1]:  # the gain that is predicted is that of what is advised first
        advice += f" That alone: {speedup(gain(1.0, without))}."
    return f"{fix} {advice}", predicted


def at(where: str | None) -> str:
    """`` at train.py:31``, or nothing when the place is not known."""
    return f" at {where}" if where else ""


def call_at(line: HotLine) -> str:
    """``Image.open(path) at dataset.py:48``."""
    return f"{line.call or line.function}{at(line.where)}"


def rates(evidence: Evidence) -> list[str]:
    """A fact that compares loader and compute ceilings; none when either was not measured."""
    ceilings = evidence.ceilings
    if ceilings.loader_samples_per_s is None or ceilings.compute_samples_per_s is None:
        return []
    return [
        f"the loader alone can give {number(ceilings.loader_samples_per_s)} samples/s, "
        f"{could_take(evidence, ceilings.compute_samples_per_s)}"
    ]


def could_take(evidence: Evidence, samples_per_s: float) -> str:
    """``compute could take 698``, or at least that many where loader workers take CPUs from it."""
    least = "at least " if evidence.crowded_by_workers else ""
    return f"{'the GPU' if evidence.on_gpu else 'compute'} could take {least}{number(samples_per_s)}"


def rewritten(evidence: Evidence, loader: LoaderRecord, **changes: int | bool) -> str:
    """The loader's call with ``changes``, as users of the framework that makes the loader write it."""
    # Whenever workers start, torch draws a seed from the generator that also shuffles.
    starts_anew = not loader.persistent_workers or made_for_each_pass(loader)
    persists = changes.get("persistent_workers") is True and starts_anew and keeps_workers(loader)
    first_workers = loader.num_workers == 0 and bool(changes.get("num_workers"))
    differ = ["random augmentations, if any, differ"] if first_workers and loader.shuffle else []
    differ += ["later epochs are shuffled differently"] if persists and loader.shuffle else []
    but = f" ({'; '.join(differ)})" if differ else ""
    if (theirs := loader_call(loader.made_by or "", changes)) is not None:
        return theirs + but
    if evidence.on_gpu and not loader.pin_memory:
        changes = {**changes, "pin_memory": True}
    written = ", ".join(f"{name}={value}" for name, value in changes.items())
    if loader.made_by not in (None, "script"):
        return f"{loader.made_by} makes this DataLoader; its own arguments or hooks for that say {written}{but}"
    call = f"DataLoader(..., {written})"
    once = "persistent_workers" in changes and made_for_each_pass(loader)
    return f"{call}, made once before the loop over epochs{but}" if once else call + but


def made_for_each_pass(loader: LoaderRecord) -> bool:
    """Whether the script makes a new loader for each pass, so that its workers cannot persist.

    A loader for each fold or stage that then makes many passes does not count.
    """
    return loader.made_by is None and loader.constructed > max(1, loader.passes / 2)
