"""How many workers to try next: by the scaling law, then beside the best. A pure function of the trials so far."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fulltilt.records import Trial
from fulltilt.tune.interval import Z_95
from fulltilt.tune.memory import ram_line
from fulltilt.tune.outcome import Attempt
from fulltilt.tune.scaling import Measured, fit_scaling
from fulltilt.tune.space import Space, is_loader_only, tried, with_loader
from fulltilt.tune.trials import WAITS, WORTH, is_valid, on_gpu, rate, start_of

MOST_WORKER_TRIALS = 7
# A gap is looked into where the law at its most hopeful comes this near to the best: real peaks stood 40 % above it.
HIDDEN = 0.8


def next_workers(trials: Sequence[Trial], space: Space) -> Attempt | None:
    """The next number of workers: half of the CPUs, then where the scaling law expects more, then beside the best."""
    start = start_of(trials)
    assert start is not None
    if (start.data_wait_share or 0.0) < WAITS or start.in_force.num_workers is None:
        return None
    searched = [trial for trial in trials if trial.purpose != "verify"]
    seen = [t for t in searched if is_loader_only(t.settings) and not t.settings.prefetch_factor]
    by_workers = {trial.in_force.num_workers: trial for trial in seen if is_valid(trial)}
    avoided = {trial.settings.num_workers for trial in seen if not is_valid(trial)}
    best = max(by_workers.values(), key=rate)
    if len(seen) > MOST_WORKER_TRIALS or (best is not start and (best.data_wait_share or 0.0) < WAITS):
        return None

    def ask(workers: int, why: str) -> Attempt | None:
        settings = with_loader(start, workers, on_gpu(start))
        return None if tried(trials, settings) else Attempt(settings, "search", why)

    most = _most_workers(seen, space)
    first = min(space.expected_workers, most)
    if len(seen) == 1 and first != start.in_force.num_workers:
        return ask(first, "half of the CPUs")
    points = [Measured(workers, rate(trial), _spread(trial)) for workers, trial in by_workers.items() if workers]
    untried = [w for w in range(1, most + 1) if w not in by_workers and w not in avoided]
    if not points or not untried:
        return ask(first, "half of the CPUs") if untried and first in untried else None
    law = fit_scaling(points, expected_peak=space.usable_cpus)
    promising = max(untried, key=lambda workers: law.at(workers).rate)
    if law.at(promising).rate >= WORTH * rate(best):
        return ask(promising, f"the scaling law expects {law.at(promising).rate:.0f} samples/s")
    # Real loaders have sharper peaks than the law: the gaps beside the best are looked into where they may hide one.
    for between in _gaps(best.in_force.num_workers or 0, by_workers, most):
        if between in untried and law.at(between).high >= HIDDEN * rate(best):
            return ask(between, "beside the best so far")
    return None


def _gaps(best: int, known: Iterable[int | None], most: int) -> list[int]:
    """Numbers halfway from the best to the nearest ones tried above and below it, while they are a quarter apart."""
    step = max(1, round(best / 5))
    above = min((w for w in known if w is not None and w > best), default=min(best + 2 * step, most + 1))
    below = max((w for w in known if w is not None and w < best), default=0)
    found = [(best + above) // 2] if above - best > step else []
    return [*found, (best + below + 1) // 2] if best - below > step else found


def _most_workers(trials: Sequence[Trial], space: Space) -> int:
    """Workers that fit into memory, by the trials so far."""
    too_many = [trial.settings.num_workers for trial in trials if trial.state == "oom" and trial.settings.num_workers]
    bounds = [space.most_workers, *(workers - 1 for workers in too_many)]
    line = ram_line(trials)
    if line is not None and space.memory_bytes is not None:
        fit = line.most_within(space.memory_bytes)
        bounds += [] if fit is None else [fit]
    return max(1, min(bounds))


def _spread(trial: Trial) -> float:
    low, high = trial.samples_per_s_low, trial.samples_per_s_high
    if low is None or high is None or not trial.samples_per_s:
        return 0.05
    return (high - low) / (2 * Z_95) / trial.samples_per_s
