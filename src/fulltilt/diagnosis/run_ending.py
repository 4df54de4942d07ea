"""How a run ended, in words: only what did not end well is said."""

from __future__ import annotations

import signal

from fulltilt.figures import count, seconds
from fulltilt.records import BUCKETS, Run, RunRecord, Span

# A job that was killed this long after its last step hung, and so many times as long as a step takes.
HUNG_S, HUNG_STEPS = 10.0, 20
MEANWHILE = {
    "data_wait_s": "it waited for data",
    "compute_s": "it computed",
    "sync_s": "it waited for the GPU",
    "host_code_s": "it ran code of the script's own",
    "validation_s": "it validated",
    "checkpoint_s": "it saved",
    "epoch_turnover_s": "it started a pass over the data",
    "communication_s": "it waited for other ranks",
}


def end_is_missing(run: Run) -> bool:
    """Whether a process of an ended run could not write down its last moments: it was killed, or left at once."""
    return run.run.state != "running" and any(not rank.finished for rank in run.ranks)


def ending(run: Run, steps: int) -> str:
    """What follows the verdict when the run did not end well; empty when it did, or still runs."""
    record, missing = run.run, end_is_missing(run)
    after = f"after {'at least ' if missing else ''}{count('step', steps)}"
    unseen = ", and what it did last was not recorded" if missing else ""
    if record.state == "crashed":
        if record.exit_code is not None:
            return f"; the script ended with exit code {record.exit_code} {after}{_for_memory(record)}{unseen}"
        return f"; stopped {after} by {record.ended_by or 'an exception'}{unseen}"
    if record.state in ("killed", "interrupted"):
        return f"; it was {record.state}{_by_signal(record)} {after}{_hung(run) or unseen}"
    return "; its end was not recorded" if missing else ""


def hung_stretch(run: Run) -> Span | None:
    """The time since the last step of a job that was killed or interrupted, if that is long ago: it hung.

    Of several ranks that of the one that is longest at it.
    """
    stretches = [rank.under_way for rank in run.ranks if rank.under_way is not None and not rank.finished]
    stretches += [spans[-1] for spans in run.spans if spans and not spans[-1].steps]
    last = max(stretches, key=lambda span: span.t1_s - span.t0_s, default=None)
    if last is None or run.run.state not in ("killed", "interrupted"):
        return None
    trained = [span for spans in run.spans for span in spans if span.steps]
    usual_s = sum(span.t1_s - span.t0_s for span in trained) / max(sum(span.steps for span in trained), 1)
    return last if last.t1_s - last.t0_s >= max(HUNG_S, HUNG_STEPS * usual_s) else None


def _hung(run: Run) -> str:
    """What a job did all the time since its last step, if it hung."""
    last = hung_stretch(run)
    most = max(BUCKETS, key=lambda name: float(getattr(last.buckets, name))) if last is not None else ""
    if last is None or most not in MEANWHILE:
        return ""
    return f"; for the last {seconds(last.t1_s - last.t0_s)} before that it made none: {MEANWHILE[most]}"


def ended_before_training(record: RunRecord) -> str | None:
    """The sentence for a run that ended badly before its first step; None when it did not."""
    if record.state == "crashed":
        if record.exit_code is not None:
            code, for_memory = record.exit_code, _for_memory(record)
            return f"The script ended with exit code {code} before its first training step{for_memory}"
        return f"Stopped by {record.ended_by or 'an exception'} before the first training step"
    if record.state in ("killed", "interrupted"):
        return f"The script was {record.state}{_by_signal(record)} before its first training step"
    return None


def _by_signal(record: RunRecord) -> str:
    code = record.exit_code
    if record.state != "killed" or code is None:
        return ""
    number = -code if code < 0 else code - 128  # a shell in front tells 128 and the signal
    if number == signal.SIGKILL and record.oom_kills:
        return " by the kernel for lack of memory (SIGKILL)"
    return f" by {signal.Signals(number).name}" if number in set(signal.Signals) else ""


def _for_memory(record: RunRecord) -> str:
    """That processes of the job were killed, where its exit code tells another story: a loader's worker was."""
    if not record.oom_kills:
        return ""
    return f", and the kernel killed {count('process', record.oom_kills)} for lack of memory"
