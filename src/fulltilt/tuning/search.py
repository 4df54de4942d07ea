"""Which trial comes next. A pure function of the trials so far, so that a study can be stopped and taken up anywhere.

The start, then the loader (workers by the scaling law, then the queue), then what the user has allowed: the batch size,
precision, compilation. At last the winner is verified against the start; that is `verify.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fulltilt.records import Settings, Trial
from fulltilt.tuning.learning_rate import accumulation_for
from fulltilt.tuning.memory import USABLE_VRAM, vram_line
from fulltilt.tuning.outcome import Attempt
from fulltilt.tuning.space import Space, changed, is_loader_only, tried
from fulltilt.tuning.trials import KNEE, WAITS, best_of, is_valid, on_gpu, rate, start_of
from fulltilt.tuning.worker_search import next_workers

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
    phases: tuple[Phase, ...] = (next_workers, _queue, _batch, _precision, _compile)
    for phase in phases:
        attempt = phase(trials, space)
        if attempt is not None:
            return attempt
    return None


# --------------------------------------------------------------------------- the loader


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
    """When the script as it is runs out of memory: the same effective batch in two, four, … equal parts."""
    tries = [trial for trial in trials if trial.purpose == "start"]
    batch_size = tries[-1].in_force.batch_size
    if tries[-1].state != "oom" or not {"batch", "accumulation"} <= space.allow or batch_size is None:
        return None
    size = batch_size
    while (smaller := accumulation_for(batch_size, size // 2)) is not None:
        parts, size = smaller
        settings = Settings(batch_size=size, accumulation=parts)
        seen = tried(trials, settings)
        if not seen:
            return Attempt(settings, "search", f"the same batch in {parts} parts")
        if any(is_valid(trial) for trial in seen):
            return None
    return None
