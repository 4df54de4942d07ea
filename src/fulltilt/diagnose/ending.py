"""How a run ended, in words: only what did not end well is said."""

from __future__ import annotations

import signal

from fulltilt.diagnose.words import count
from fulltilt.records import Run, RunRecord


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
        return f"; it was {record.state}{_by_signal(record)} {after}{unseen}"
    return "; its end was not recorded" if missing else ""


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
