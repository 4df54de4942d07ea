"""Which trial comes next. A pure function of the trials so far, so that a study can be stopped and taken up anywhere.

The start, then the loader (workers by the scaling law, then the queue), then what the user has allowed: the batch size,
precision, compilation. At last the winner is verified against the start; that is `verify.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fulltilt.records import Settings, Trial
from fulltilt.tune.interval import Z_95
from fulltilt.tune.memory import USABLE_VRAM, ram_line, vram_line
from fulltilt.tune.outcome import Attempt
from fulltilt.tune.scaling import Measured, fit_scaling
from fulltilt.tune.space import Space, changed, is_loader_only, tried, with_loader

# A change is worth a trial, or worth having, when it promises this much.
WORTH = 1.02
# Below this share of waiting the loader is not what limits the job.
WAITS = 0.03
MOST_WORKER_TRIALS = 7
# The knee: doubling the batch gains less than this.
KNEE = 1.05
MOST_TRIES_WHEN_THROTTLED = 3

Phase = Callable[[Sequence[Trial], Space], Attempt | None]


def next_attempt(trials: Sequence[Trial], space: Space) -> Attempt | None:
    """The next trial of the search; None when there is nothing left that promises anything."""
    start = start_of(trials)
    if start is None:
        tries = [trial for trial in trials if trial.purpose == "start"]
        retry = not tries or (tries[-1].state == "throttled" and len(tries) < MOST_TRIES_WHEN_THROTTLED)
        if retry:
            return Attempt(Settings(), "start", "the script as it is")
        return _smaller_parts(trials, space)
    phases: tuple[Phase, ...] = (_workers, _queue, _batch, _precision, _compile)
    for phase in phases:
        attempt = phase(trials, space)
        if attempt is not None:
            return attempt
    return None


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


# --------------------------------------------------------------------------- the loader


def _workers(trials: Sequence[Trial], space: Space) -> Attempt | None:
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

    most = _most_workers(trials, space)
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
    for neighbour in _neighbours(best.in_force.num_workers or 0, untried, by_workers):
        if law.at(neighbour).high >= KNEE * rate(best):
            return ask(neighbour, "beside the best so far")
    return None


def _neighbours(best: int, untried: list[int], known: dict[int | None, Trial]) -> list[int]:
    """The numbers a quarter above and below the best, as long as nothing that close was tried on that side."""
    step = max(1, round(best / 4))
    found = []
    for side in (1, -1):
        tried_there = any(w is not None and 0 < side * (w - best) <= step for w in known)
        if not tried_there and best + side * step in untried:
            found.append(best + side * step)
    return found


def _most_workers(trials: Sequence[Trial], space: Space) -> int:
    """Workers that fit into memory, by the trials so far."""
    line = ram_line(trials)
    fit = None if line is None or space.memory_bytes is None else line.most_within(space.memory_bytes)
    return space.most_workers if fit is None else max(1, min(space.most_workers, fit))


def _spread(trial: Trial) -> float:
    low, high = trial.samples_per_s_low, trial.samples_per_s_high
    if low is None or high is None or not trial.samples_per_s:
        return 0.05
    return (high - low) / (2 * Z_95) / trial.samples_per_s


def _queue(trials: Sequence[Trial], _space: Space) -> Attempt | None:
    """A longer queue at the best number of workers, as long as it pays."""
    best = best_of([trial for trial in trials if is_loader_only(trial.settings)])
    assert best is not None
    if not best.in_force.num_workers or (best.data_wait_share or 0.0) < WAITS:
        return None
    longer = 2 * (best.in_force.prefetch_factor or 2)
    settings = changed(best.settings, prefetch_factor=longer)
    return None if longer > 8 or tried(trials, settings) else Attempt(settings, "search", "a longer queue")


# --------------------------------------------------------------------------- what was allowed by name


def _batch(trials: Sequence[Trial], space: Space) -> Attempt | None:
    """Twice the batch until memory ends or the knee is reached, then the largest that the memory line promises."""
    start = start_of(trials)
    if "batch" not in space.allow or start is None or start.in_force.batch_size is None:
        return None
    base = best_of([trial for trial in trials if is_loader_only(trial.settings)]) or start
    sizes = {
        trial.settings.batch_size: trial
        for trial in trials
        if trial.settings.batch_size and trial.settings == changed(base.settings, batch_size=trial.settings.batch_size)
    }
    fitting = {start.in_force.batch_size: base, **{size: t for size, t in sizes.items() if size and is_valid(t)}}
    failed = [size for size, trial in sizes.items() if size and not is_valid(trial)]
    largest = max(fitting)
    smaller = [size for size in fitting if size < largest]
    if smaller and rate(fitting[largest]) < KNEE * rate(fitting[max(smaller)]):
        return None
    if any(t.in_force.batch_size != t.settings.batch_size for t in sizes.values() if is_valid(t)):
        return None  # the batch size did not take effect: the trial's note says why
    wanted = 2 * largest
    line = vram_line(fitting.values())
    room = None if line is None or start.vram_total_bytes is None else USABLE_VRAM * start.vram_total_bytes
    most = line.most_within(room) if line is not None and room is not None else None
    if (most is not None and wanted > most) or any(size <= wanted for size in failed):
        if most is None or any(size <= most for size in failed):
            return None
        wanted = most - most % 8 if most >= 8 else most
        if wanted < 1.25 * largest:
            return None
    settings = changed(base.settings, batch_size=wanted)
    return None if tried(trials, settings) else Attempt(settings, "search", "a larger batch")


def _precision(trials: Sequence[Trial], space: Space) -> Attempt | None:
    start, best = start_of(trials), best_of(trials)
    assert start is not None
    assert best is not None
    if "precision" not in space.allow or start.in_force.precision not in (None, "float32"):
        return None
    for precision in ("bf16", "tf32") if on_gpu(start) else ("bf16",):
        seen = [trial for trial in trials if trial.settings.precision == precision]
        if not seen:
            base = best_of([trial for trial in trials if trial.settings.precision is None])
            assert base is not None
            return Attempt(changed(base.settings, precision=precision), "search", precision)
        if any(is_valid(trial) and trial is best for trial in seen):
            return None
    return None


def _compile(trials: Sequence[Trial], space: Space) -> Attempt | None:
    start = start_of(trials)
    assert start is not None
    if "compile" not in space.allow or start.in_force.compile or any(t.settings.compile for t in trials):
        return None
    best = best_of(trials)
    assert best is not None
    return Attempt(changed(best.settings, compile=True), "search", "torch.compile")


def _smaller_parts(trials: Sequence[Trial], space: Space) -> Attempt | None:
    """When the script as it is runs out of memory: the same effective batch in two, four, … parts."""
    tries = [trial for trial in trials if trial.purpose == "start"]
    batch_size = tries[-1].in_force.batch_size
    if tries[-1].state != "oom" or not {"batch", "accumulation"} <= space.allow or batch_size is None:
        return None
    parts = 2
    while batch_size % parts == 0:
        settings = Settings(batch_size=batch_size // parts, accumulation=parts)
        seen = tried(trials, settings)
        if not seen:
            return Attempt(settings, "search", f"the same batch in {parts} parts")
        if any(is_valid(trial) for trial in seen):
            return None
        parts *= 2
    return None


def knee_of(trials: Sequence[Trial]) -> Trial | None:
    """The smallest batch whose rate is within 5 % of the best: a larger one costs memory and steps for nothing."""
    valid = [trial for trial in trials if is_valid(trial) and trial.purpose != "verify" and trial.settings.batch_size]
    if not valid:
        return None
    top = max(map(rate, valid))
    return min((t for t in valid if rate(t) * KNEE >= top), key=lambda t: t.settings.batch_size or 0)
