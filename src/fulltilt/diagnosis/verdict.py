"""The run in one sentence."""

from __future__ import annotations

import signal

from fulltilt.diagnosis.evidence import Evidence
from fulltilt.diagnosis.findings import BUCKET_WORDS, could_take
from fulltilt.diagnosis.ledger import hung_stretch, rate_while_drawing
from fulltilt.diagnosis.predicted_gain import amdahl
from fulltilt.diagnosis.rules import RULES
from fulltilt.diagnosis.rules.live_tuning import changes, live_words
from fulltilt.diagnosis.stragglers import Standstill, standstill
from fulltilt.diagnosis.thresholds import THRESHOLDS
from fulltilt.figures import SIGNALS, capital, count, number, percent, seconds, times
from fulltilt.records import BUCKETS, Finding, RankRecord, Run, RunRecord, Verdict


def reach_verdict(evidence: Evidence, findings: tuple[Finding, ...]) -> Verdict:
    """The verdict: the first finding's code and share, and the sentence that people read."""
    if evidence.throughput.steps == 0:
        return Verdict("no_steps", 0.0, f"{_nothing_trained(evidence)}.")
    ended = _ending(evidence.run, evidence.throughput.steps)
    if not findings and evidence.too_short:
        seen = f"{count('step', evidence.throughput.steps)} in {seconds(evidence.active_s)} after start-up"
        short = evidence.active_s <= THRESHOLDS.longest_too_short_s
        wanted = f"more than {seconds(THRESHOLDS.longest_too_short_s)}" if short else "more steps"
        return Verdict("too_short", 0.0, f"Too short to tell: {seen}; let it train for {wanted}{ended}.")
    if not findings:
        # No rule found anything and compute does not dominate: name the largest bucket.
        largest = max((b for b in BUCKETS if b != "startup_s"), key=lambda bucket: getattr(evidence.buckets, bucket))
        share = evidence.share(getattr(evidence.buckets, largest))
        sentence = f"No cause found: {BUCKET_WORDS[largest]} takes {percent(share)} of the time after start-up"
        if largest == "compute_s" and evidence.collectives_unmeasured:
            sentence += ", including the time that ranks wait for each other's parameters, which is not measured"
        return Verdict("unexplained", share, f"{sentence}{ended}.")
    first = findings[0]
    tuned = "" if evidence.live is None else f"; {live_words(evidence.live)}"
    return Verdict(first.code, first.share, f"{_sentence(evidence, first)}{tuned}{ended}.")


# --------------------------------------------------------------------------- sentences

# For each code its title, and the sentence that follows it; where that is None it is made below.
WORDS: dict[str, tuple[str, str | None]] = {
    **{rule.code: (rule.title, rule.sentence) for rule in RULES},
    "no_steps": ("No training steps", None),
    "too_short": ("Run too short", None),
    "unexplained": ("No cause found", None),
}


def title(code: str) -> str:
    """The title of a finding code."""
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
    most = f"; up to {times(predicted[1])} as fast" if predicted and predicted[1] > 1 else ""
    sentence = template.format(
        share=f"{percent(share)} of the time after start-up",
        fact=finding.evidence[0],
        place=f" ({finding.where})" if finding.where else "",
        most=most,  # what is done less often does not go away
        win=f"{most} without it" if most else "",
        guess=f"; at best about {times(predicted[1])} as fast without it" if predicted and predicted[1] > 1 else "",
        trainee="the GPU" if evidence.on_gpu else "training",
        exchange="gathering parameters" if evidence.rank.sharded else "exchanging gradients",
        gain=_gain(evidence, share),
    )
    return f"{words.replace(':', ',')}: {sentence}"


def _gain(evidence: Evidence, share: float) -> str:
    """The gain if training no longer waits for data.

    Empty for a run under live tuning, whose rate is a mix of several settings: there the trials say what is gained.
    """
    if evidence.live is not None and evidence.live.moves:
        return ""
    rate, ceiling = rate_while_drawing(evidence.run), evidence.ceilings.compute_samples_per_s
    most, rates = amdahl(share), ""
    if rate and ceiling and ceiling > rate:
        # Without workers loading and computing take turns: the rate is the job's, apart from its pauses.
        pauses = rate > (evidence.throughput.samples_per_s or rate) * (1 + THRESHOLDS.rate_error)
        when = "between validations and saves " if pauses else ""
        most = min(ceiling / rate, most)
        rates = f": {when}training gets {number(rate)} samples/s, {could_take(evidence, ceiling)}"
    return f"; {evidence.bound} {times(most)} as fast without it{rates}"


def _compute_bound(evidence: Evidence, finding: Finding) -> str:
    share, reached, rate = finding.share, evidence.share_of_ceiling, ""
    if reached is not None:
        speed = number(evidence.throughput.samples_per_s or 0.0)
        rate = f"; {speed} samples/s, {percent(reached)} of the compute ceiling"
    time = f"{percent(share)} of the time after start-up"
    if share >= THRESHOLDS.full_tilt_share:
        place = f" ({finding.where})" if finding.where else ""
        return f"{title_of(finding).replace(':', ',')}: {time} is compute{place}{rate}"
    return f"Mostly compute: {time}, and no single cause takes much of the rest{rate}"


def _nothing_trained(evidence: Evidence) -> str:
    run = evidence.run.run
    backwards = sum(rank.backwards for rank in evidence.run.ranks)
    batches = sum(loader.batches for rank in evidence.run.ranks for loader in rank.loaders)
    if steps := max((rank.steps for rank in evidence.run.ranks), default=0):
        return f"{count('step', steps)} trained, but it is not known when: steps.jsonl is missing or empty"
    if (ended := _how_it_ended(run, "the script", "before its first training step")) is not None:
        return capital(ended)
    if not evidence.run.ranks:
        return "Nothing was recorded: no process of the job called backward() or an optimizer of torch"
    if backwards:
        return f"No optimizer step was seen, but backward() ran {count('time', backwards)}"
    if batches:
        return f"No training was seen: {count('batch', batches)} came, but no backward() and no optimizer step"
    if run.state == "running":
        return "Nothing has trained yet: no optimizer step was seen so far"
    return "No training was seen: no DataLoader, no backward() and no optimizer step"


# --------------------------------------------------------------------------- how the run ended


def _ending(run: Run, steps: int) -> str:
    """How a run ended, for the end of the verdict; empty when it ended well or still runs."""
    # A process of an ended run that has not written its last record was killed, or exited at once.
    missing = run.run.state != "running" and any(not rank.finished for rank in run.ranks)
    end = _how_it_ended(run.run, "it", f"after {'at least ' if missing else ''}{count('step', steps)}")
    hung = _stands_still(still) if (still := standstill(run)) is not None else ""
    if end is None:
        return hung or ("; its end was not recorded" if missing else "")
    return f"; {end}{hung or _hung(run) or (', and what it did last was not recorded' if missing else '')}"


def _how_it_ended(record: RunRecord, who: str, when: str) -> str | None:
    """How a run ended badly: ``the script ended with exit code 1 after 7 steps``; None when it did not."""
    if record.state in ("killed", "interrupted"):
        return f"{who} was {record.state}{_by_signal(record)} {when}"
    if record.state != "crashed":
        return None
    if record.exit_code is not None:
        # The exit code does not show that the kernel killed a loader's worker.
        killed = f", and the kernel killed {count('process', record.oom_kills)} for lack of memory"
        return f"the script ended with exit code {record.exit_code} {when}{killed if record.oom_kills else ''}"
    return f"stopped by {record.ended_by or 'an exception'} {when}"


def _hung(run: Run) -> str:
    """What a job did since its last step, if it hung."""
    last = hung_stretch(run)
    most = max(BUCKETS, key=lambda name: float(getattr(last.buckets, name))) if last is not None else ""
    if last is None or most in ("startup_s", "unattributed_s"):
        return ""
    return f"; no step in the last {seconds(last.t1_s - last.t0_s)}: {BUCKET_WORDS[most]}"


def _stands_still(still: Standstill) -> str:
    """Which ranks the others wait for, and the line that each of them is at."""
    missing = []
    for rank, silent_s in still.missing[:_SHOWN_RANKS]:
        at = f"was last at {_line(rank)}" if silent_s is not None else f"is at {_line(rank)}"
        silent = f"has written nothing for {seconds(silent_s)} and " if silent_s is not None else ""
        missing.append(f"rank {rank.rank} on {rank.hostname} {silent}{at}")
    more = f" and {len(still.missing) - _SHOWN_RANKS} more" if len(still.missing) > _SHOWN_RANKS else ""
    lines = dict.fromkeys(_line(rank) for rank in still.waiting)
    wait = "waits" if len(still.waiting) == 1 else "wait"
    others = f"{count('rank', len(still.waiting))} {wait} for {'it' if len(still.missing) == 1 else 'them'}"
    return f"; no step for {seconds(still.for_s)}: {', '.join(missing)}{more}; {others} at {', '.join(list(lines)[:2])}"


_SHOWN_RANKS = 3


def _line(rank: RankRecord) -> str:
    if rank.at is None:
        return "an unknown line"
    return f"{rank.at.where} ({rank.at.call})" if rank.at.call else rank.at.where


def _by_signal(record: RunRecord) -> str:
    code = record.exit_code
    if record.state != "killed" or code is None:
        return ""
    number = -code if code < 0 else code - 128  # a shell reports 128 plus the signal
    if number == signal.SIGKILL and record.oom_kills:
        return " by the kernel for lack of memory (SIGKILL)"
    return f" by {SIGNALS[number]}" if number in SIGNALS else ""
