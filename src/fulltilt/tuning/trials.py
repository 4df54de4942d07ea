"""Questions about the trials of a study: which count, which is best. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from fulltilt.records import Trial

# A change is worth a trial, or worth having, when it promises this much.
WORTH = 1.02
# Below this share of waiting the loader is not what limits the job.
WAITS = 0.03
# The knee: doubling the batch gains less than this.
KNEE = 1.05
# The relative error of a trial that ended after a single block, whose interval has no end.
OF_ONE_BLOCK = 0.5


def start_of(trials: Sequence[Trial]) -> Trial | None:
    """The trial of the script as it is, once it was measured."""
    return next((trial for trial in trials if trial.purpose == "start" and is_valid(trial)), None)


def is_valid(trial: Trial) -> bool:
    """Whether a trial's rate counts."""
    return trial.state == "ok" and trial.samples_per_s is not None


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """The fastest valid trial of the search, the earliest of equals."""
    valid = [trial for trial in trials if is_valid(trial) and trial.purpose != "verify"]
    return max(valid, key=rate, default=None)


def rate(trial: Trial) -> float:
    """Samples a second, 0 where none were measured."""
    return trial.samples_per_s or 0.0


def on_gpu(trial: Trial) -> bool:
    """Whether the job trains on a GPU."""
    return trial.vram_peak_bytes is not None


def knee_of(trials: Sequence[Trial]) -> Trial | None:
    """The smallest batch whose rate is within 5 % of the best: a larger one costs memory and steps for nothing."""
    valid = [trial for trial in trials if is_valid(trial) and trial.purpose != "verify" and trial.settings.batch_size]
    if not valid:
        return None
    top = max(map(rate, valid))
    return min((t for t in valid if rate(t) * KNEE >= top), key=lambda t: t.settings.batch_size or 0)
