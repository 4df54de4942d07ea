"""The run in one sentence."""

from __future__ import annotations

import signal

from fulltilt.diagnosis.evidence import Evidence
from fulltilt.diagnosis.findings import BUCKET_WORDS, amdahl
from fulltilt.diagnosis.ledger import hung_stretch, rate_while_drawing
from fulltilt.diagnosis.rules.live_tuning import changes, live_words
from fulltilt.diagnosis.stragglers import Standstill, standstill
from fulltilt.diagnosis.thresholds import LIMITS
from fulltilt.figures import capital, count, number, percent, seconds, speedup, times
from fulltilt.records import BUCKETS, Finding, RankRecord, Run, RunRecord, Verdict


def reach_verdict(evidence: Evidence, findings: tuple[Finding, ...]) -> Verdict:
    """The verdict: the first finding's code and share, and the sentence that people read."""
    if evidence.throughput.steps == 0:
        return Verdict("no_steps", 0.0, f"{_nothing_trained(evidence)}.")
    ended = _ending(evidence.run, evidence.throughput.steps)
    if not findings and evidence.too_short:
        seen = f"{count('step', evidence.throughput.steps)} in {seconds(evidence.active_s)} after start-up"
        short = evidence.active_s <= LIMITS.longest_too_short_s
        wanted = f"more than {seconds(LIMITS.longest_too_short_s)}" if short else "more steps"
        return Verdict("too_short", 0.0, f"Too short to tell: {seen}; let it train for {wanted}{ended}.")
    if not findings:
        # No rule found anything and compute does not dominate: name what does, and that its cause is not known.
        largest = max((b for b in BUCKETS if b != "startup_s"), key=lambda bucket: getattr(evidence.buckets, bucket))
        share = evidence.share(getattr(evidence.buckets, largest))
        name = largest.removesuffix("_s").replace("_", " ")
        told = f"No cause found: {name} takes {percent(share)} of the time after start-up"
        if largest == "compute_s" and evidence.collectives_unmeasured:
            told += ", with what the ranks wait for each other's parameters in it, which is not measured"
        return Verdict("unexplained", share, f"{told}{ended}.")
    first = findings[0]
    tuned = "" if evidence.live is None else f"; {live_words(evidence.live)}"
    return Verdict(first.code, first.share, f"{_sentence(evidence, first)}{tuned}{ended}.")


# --------------------------------------------------------------------------- sentences

_DATA_WAIT = "{trainee} waits for data in {share}{gain}"

# A finding's code in the words of the field, and the sentence behind them; {share} is of the time after start-up.
# {win} is a bound: the time that is counted goes away, and no other. {guess} is none: what else it slows is not
# counted, or it does not go away altogether. Where there is no template the sentence is put together below.
WORDS: dict[str, tuple[str, str | None]] = {
    "input_serial": ("Data loading: no workers", "{trainee} waits for data in {share}{idle}{gain}"),
    "input_cpu_bound": ("Data loading: CPU-bound", _DATA_WAIT),
    "input_io_bound": ("Data loading: I/O-bound", _DATA_WAIT),
    "slow_storage": ("Data loading: slow storage", "{trainee} waits for data in {share}{win}"),
    "input_handover": ("Data loading: slow hand-over from the workers", _DATA_WAIT),
    "epoch_restart": ("A pause at each epoch's start", "starting {passes} over the data takes {share}{win}"),
    "dataset_pickled": ("Data set pickled to every worker", "{fact}{win}"),
    "transfer_blocking": (
        "Blocking copies to the GPU",
        "the GPU is idle in {share} while batches are copied to it{place}{win}",
    ),
    "sync_point": (
        "Host waits for the GPU",
        "the GPU is idle in {share} because the script waits for its results{place}{win}",
    ),
    "launch_bound": ("Launch-bound", "the GPU is idle between kernels in {share}{win}"),
    "batch_too_small": ("Batch too small", "it does not fill the GPU{win}"),
    "precision_unused": ("Tensor cores unused", "the model computes in float32{guess}"),
    "free_switches": ("Free switches unused", "{fact}{win}"),
    "padding_waste": ("Padding", "{fact}{win}"),
    "slowing_down": ("Slowing down", "{fact}{place}{guess}"),
    "host_code": ("Python code in the training loop", "the script's own code takes {share}{place}{win}"),
    "recompiling": ("Recompilation", "{fact}{place}{win}"),
    "gc_pauses": ("Garbage collection", "Python's collector holds the training up in {share}{place}{win}"),
    "validation_heavy": ("Validation", "it takes {share}{most}"),
    "checkpoint_stall": ("Blocking checkpoints", "training stands still for them in {share}{place}{most}"),
    "memory_pressure": ("Memory pressure", "{fact}"),
    "worker_memory_growth": ("Worker memory growth", "{fact}"),
    "cpu_affinity": ("CPU affinity", "{fact}{guess}"),
    "launch_contended": ("No CPU to launch on", "{fact}{guess}"),
    "gil_contended": ("GIL contention", "{fact}{guess}"),
    "cpu_oversubscribed": ("CPU oversubscribed", "{fact} and slow each other down{guess}"),
    "shm_small": ("Shared memory too small", "{fact}"),
    "throttled": ("GPU throttled", "{fact}{win}"),
    "gpu_shared": ("GPU shared", "{fact}{guess}"),
    "straggler": ("Straggler", "{fact}{win}"),
    "communication_bound": ("Communication-bound", "{exchange} takes {share}{guess}"),
    "find_unused_parameters": ("Needless search for unused parameters", "{fact}"),
    "compute_bound": ("Compute-bound", None),
    "no_steps": ("No training steps", None),
    "too_short": ("Run too short", None),
    "unexplained": ("No cause found", None),
}


def title(code: str) -> str:
    """A finding's code in the words of the field."""
    return WORDS[code][0] if code in WORDS else code


def title_of(finding: Finding) -> str:
    """The rule's own title, or the usual one of its code."""
    return finding.title or title(finding.code)


def _sentence(evidence: Evidence, finding: Finding) -> str:
    share = finding.share
    predicted = finding.predicted_speedup
    words, template = title_of(finding), WORDS[finding.code][1]
    if finding.code == "input_serial" and evidence.live is not None and changes(evidence.live):
        words += " in the script"
    if template is None:
        return _compute_bound(evidence, finding)
    most = f"; at most {times(predicted[1])} as fast" if predicted and predicted[1] > 1 else ""
    told = template.format(
        share=f"{percent(share)} of the time after start-up",
        fact=finding.evidence[0],
        place=f" ({finding.where})" if finding.where else "",
        most=most,  # what comes more rarely does not go away
        win=f"{most} without it" if most else "",
        guess=f"; at best about {times(predicted[1])} as fast without it" if predicted and predicted[1] > 1 else "",
        idle=_idle(evidence) if words == title("input_serial") else "",
        trainee="the GPU" if evidence.on_gpu else "training",
        exchange="gathering parameters" if evidence.rank.sharded else "exchanging gradients",
        passes=count("pass", evidence.loader.passes) if evidence.loader else "passes",
        gain=_gain(evidence, share, predicted),
    )
    return f"{words.replace(':', ',')}: {told}"


def _gain(evidence: Evidence, share: float, predicted: tuple[float, float] | None) -> str:
    """How much there is to gain when training no longer waits for data, and of that by the finding's fix, if less.

    The rate of a run under live tuning is that of no settings in particular: its gain is told by what was tried.
    """
    if evidence.live is not None and evidence.live.moves:
        return ""
    rate, ceiling = rate_while_drawing(evidence.run), evidence.ceilings.compute_samples_per_s
    if rate and ceiling and ceiling > rate:
        taker = "the GPU" if evidence.on_gpu else "compute"
        # Without workers loading and computing take turns: the rate is the job's, but for its pauses.
        pauses = rate > (evidence.throughput.samples_per_s or rate) * (1 + LIMITS.rate_error)
        when = "between validations and saves " if pauses else ""
        most = min(ceiling / rate, amdahl(share))
        rates = f"{when}training gets {number(rate)} samples/s, {taker} could take {number(ceiling)}"
        return f"; {_without(evidence, most, predicted)}: {rates}"
    return f"; {_without(evidence, amdahl(share), predicted)}"


def _without(evidence: Evidence, most: float, predicted: tuple[float, float] | None) -> str:
    less = evidence.bound != "at most" and predicted is not None and predicted[1] < (1 - LIMITS.rate_error) * most
    fix = f" (its fix alone: {speedup(predicted)})" if less else ""
    return f"{evidence.bound} {times(most)} as fast without it{fix}"


def _idle(evidence: Evidence) -> str:
    """That what the training thread fetches by itself keeps it waiting, and not computing."""
    waits = evidence.supply is not None and evidence.supply.waits
    return " (the fetch itself waits, it does not compute)" if waits else ""


def _compute_bound(evidence: Evidence, finding: Finding) -> str:
    share, reached, rate = finding.share, evidence.share_of_ceiling, ""
    if reached is not None:
        speed = number(evidence.throughput.samples_per_s or 0.0)
        rate = f"; {speed} samples/s, {percent(reached)} of the compute ceiling"
    told = f"{percent(share)} of the time after start-up"
    if share >= LIMITS.full_tilt_share:
        place = f" ({finding.where})" if finding.where else ""
        return f"{title_of(finding).replace(':', ',')}: {told} is compute{place}{rate}"
    return f"Mostly compute: {told}, and no single cause takes much of the rest{rate}"


def _nothing_trained(evidence: Evidence) -> str:
    run = evidence.run.run
    backwards = sum(rank.backwards for rank in evidence.run.ranks)
    batches = sum(loader.batches for rank in evidence.run.ranks for loader in rank.loaders)
    if steps := max((rank.steps for rank in evidence.run.ranks), default=0):
        return f"{count('step', steps)} trained, but their time cannot be told: steps.jsonl is missing or empty"
    if (ended := _how_it_ended(run, "the script", "before its first training step")) is not None:
        return capital(ended)
    if not evidence.run.ranks:
        return "Nothing was recorded: no process of the job trained with torch"
    if backwards:
        return f"No optimizer step was seen, but backward() ran {count('time', backwards)}"
    if batches:
        return f"No training was seen: {count('batch', batches)} came, but no backward() and no optimizer step"
    if run.state == "running":
        return "Nothing has trained yet: no optimizer step was seen so far"
    return "No training was seen: no DataLoader, no backward() and no optimizer step"


# --------------------------------------------------------------------------- how the run ended


def _ending(run: Run, steps: int) -> str:
    """What follows the verdict when the run did not end well; empty when it did, or still runs."""
    # A process of an ended run that could not write down its last moments was killed, or left at once.
    missing = run.run.state != "running" and any(not rank.finished for rank in run.ranks)
    told = _how_it_ended(run.run, "it", f"after {'at least ' if missing else ''}{count('step', steps)}")
    hung = _stands_still(still) if (still := standstill(run)) is not None else ""
    if told is None:
        return hung or ("; its end was not recorded" if missing else "")
    return f"; {told}{hung or _hung(run) or (', and what it did last was not recorded' if missing else '')}"


def _how_it_ended(record: RunRecord, who: str, when: str) -> str | None:
    """How a run ended badly: ``the script ended with exit code 1 after 7 steps``; None when it did not."""
    if record.state in ("killed", "interrupted"):
        return f"{who} was {record.state}{_by_signal(record)} {when}"
    if record.state != "crashed":
        return None
    if record.exit_code is not None:
        # Its exit code may tell another story than why a loader's worker was killed.
        killed = f", and the kernel killed {count('process', record.oom_kills)} for lack of memory"
        return f"the script ended with exit code {record.exit_code} {when}{killed if record.oom_kills else ''}"
    return f"stopped by {record.ended_by or 'an exception'} {when}"


def _hung(run: Run) -> str:
    """What a job did all the time since its last step, if it hung."""
    last = hung_stretch(run)
    most = max(BUCKETS, key=lambda name: float(getattr(last.buckets, name))) if last is not None else ""
    if last is None or most in ("startup_s", "unattributed_s"):
        return ""
    return f"; for the last {seconds(last.t1_s - last.t0_s)} before that it made none: {BUCKET_WORDS[most]}"


def _stands_still(still: Standstill) -> str:
    """Which ranks the others wait for, and on which line each of them stands."""
    told = []
    for rank, silent_s in still.missing[:_TOLD_RANKS]:
        at = f"was last at {_line(rank)}" if silent_s is not None else f"is at {_line(rank)}"
        silent = f"has written nothing for {seconds(silent_s)} and " if silent_s is not None else ""
        told.append(f"rank {rank.rank} on {rank.hostname} {silent}{at}")
    more = f" and {len(still.missing) - _TOLD_RANKS} more" if len(still.missing) > _TOLD_RANKS else ""
    lines = dict.fromkeys(_line(rank) for rank in still.waiting)
    wait = "waits" if len(still.waiting) == 1 else "wait"
    others = f"{count('rank', len(still.waiting))} {wait} for {'it' if len(still.missing) == 1 else 'them'}"
    return f"; no step for {seconds(still.for_s)}: {', '.join(told)}{more}; {others} at {', '.join(list(lines)[:2])}"


_TOLD_RANKS = 3


def _line(rank: RankRecord) -> str:
    if rank.at is None:
        return "a line that is not known"
    return f"{rank.at.where} ({rank.at.call})" if rank.at.call else rank.at.where


def _by_signal(record: RunRecord) -> str:
    code = record.exit_code
    if record.state != "killed" or code is None:
        return ""
    number = -code if code < 0 else code - 128  # a shell in front tells 128 and the signal
    if number == signal.SIGKILL and record.oom_kills:
        return " by the kernel for lack of memory (SIGKILL)"
    return f" by {signal.Signals(number).name}" if number in set(signal.Signals) else ""
