"""Findings about a loader under live tuning: its measurements replace the rules' predictions.

The run's own figures mix the times before, during and after the trials, so the rules' advice on workers and prefetch
would contradict what was tried.
"""

from __future__ import annotations

from dataclasses import fields, replace

from fulltilt.diagnosis.evidence import Evidence
from fulltilt.diagnosis.findings import (
    OTHERS_TAKE_CPUS,
    WORKERS_SHARE_LOCK,
    Judgement,
    at,
    costliest_line,
    fetching_line,
    neighbours,
    rewritten,
    time_spent,
)
from fulltilt.diagnosis.libraries import is_library_code
from fulltilt.diagnosis.predicted_gain import Gain, by_removing
from fulltilt.diagnosis.rules.worker_count import gain_without_wait
from fulltilt.diagnosis.thresholds import THRESHOLDS
from fulltilt.figures import loader_settings, number, percent, times
from fulltilt.records import Finding, LiveMove, LiveRecord, LoaderRecord, Settings

_INPUT = ("input_serial", "input_cpu_bound", "input_io_bound", "input_handover")
_OF_THE_LOADER = (*_INPUT, "cpu_oversubscribed")


def as_measured(evidence: Evidence, judgement: Judgement) -> Judgement:
    """A finding about the loader, rewritten with the figures and settings that live tuning measured."""
    loader, live = evidence.loader, evidence.live
    if not isinstance(judgement, Finding) or judgement.code not in _OF_THE_LOADER or loader is None or live is None:
        return judgement
    if live.state == "left_alone":
        first = f"Live tuning left this loader alone: {live.why}. After fixing that, or if it does not matter: "
        return replace(judgement, fix=first + judgement.fix)
    # The best number of workers was measured: that they queue for CPUs only means that CPUs limit them.
    code = "input_cpu_bound" if judgement.code == "cpu_oversubscribed" else judgement.code
    if not changes(live) and not _judged(live):
        trial = on_trial(live)
        if trial is None or not live.before.num_workers:
            return judgement
        # The workers' figures mix two settings, so they give no advice.
        fix = f"Run it longer with --auto, or once without: live tuning had only begun to try {settings_words(trial)}."
        facts = tuple(_facts(evidence, live))
        return replace(judgement, code=code, evidence=facts, fix=fix, predicted_speedup=gain_without_wait(evidence))
    if judgement.title == WORKERS_SHARE_LOCK:
        return replace(judgement, evidence=(*judgement.evidence, *_facts(evidence, live)[1:]))
    serial = live.before.num_workers == 0 and judgement.code in _INPUT
    return replace(
        judgement,
        code="input_serial" if serial else code,
        evidence=tuple(_facts(evidence, live)),
        where=loader.where,
        fix=_fix(evidence, loader, live),
        predicted_speedup=_gain(evidence, loader, live),
    )


def _judged(live: LiveRecord) -> list[LiveMove]:
    return [move for move in live.moves if move.outcome in ("kept", "returned")]


def _facts(evidence: Evidence, live: LiveRecord) -> list[str]:
    facts = [time_spent(evidence, "waiting for data", evidence.buckets.data_wait_s)]
    if live.before_batches_per_s is not None and live.before_wait_share is not None:
        rate = _measured(live.before_batches_per_s, live.before_wait_share)
        facts.append(f"as the script has it ({settings_words(live.before)}): {rate}")
    for move in live.moves:
        words = f"live tuning tried {settings_words(move.settings)}"
        if move.batches_per_s is not None and move.wait_share is not None:
            end = {"kept": "kept", "trying": "on trial at the end"}.get(move.outcome, "not kept")
            why = f" ({move.why})" if move.why else ""
            facts.append(f"{words}: {_measured(move.batches_per_s, move.wait_share)}, {end}{why}")
        elif move.outcome == "failed":
            facts.append(f"{words}: it failed ({move.why})")
    return facts + fetching_line(evidence) + neighbours(evidence)


def _fix(evidence: Evidence, loader: LoaderRecord, live: LiveRecord) -> str:
    changed = changes(live)
    place = at(loader.where)
    if changed:
        call = {name: after for name, (_, after) in changed.items() if isinstance(after, int)}
        fix = f"Write what live tuning found into the script{place}: {rewritten(evidence, loader, **call)}."
    else:
        tried = "; ".join(dict.fromkeys(settings_words(move.settings) for move in _judged(live)))
        fix = f"Leave the loader{place} at {settings_words(live.settings)}: live tuning tried {tried}."
    if _still_waits(live):
        line, fetch_s = costliest_line(evidence), evidence.workers.fetch_s if evidence.workers else 0.0
        telling = line and line.seconds >= THRESHOLDS.guilty_function_share * fetch_s and not is_library_code(line)
        cheaper = f"{line.function} ({line.where})" if line and telling else f"the data set {loader.dataset}"
        waits = f"waits for data {percent(live.wait_share)} of the measured time"
        fix += f" Training still {waits} with {settings_words(live.settings)}: make {cheaper} cheaper."
    return f"{fix} {OTHERS_TAKE_CPUS}" if neighbours(evidence) else fix


def _still_waits(live: LiveRecord) -> bool:
    """Whether no setting made the loader fast enough."""
    return live.wait_share is not None and live.wait_share >= THRESHOLDS.warn_share


def _gain(evidence: Evidence, loader: LoaderRecord, live: LiveRecord) -> Gain | None:
    """The gain of starting with the settings that live tuning found, over this run, which had to find them.

    Where training still waits with them, a cheaper fetch wins more: up to all of the wait.
    """
    if not live.batches_per_s or live.wait_share is None:
        return None
    if not changes(live):
        return gain_without_wait(evidence) if _still_waits(live) else None
    left_s = loader.batches * live.wait_share / live.batches_per_s
    saved_s = max(evidence.buckets.data_wait_s - left_s, 0.0)
    low, high = by_removing(evidence.share(saved_s))
    return low, gain_without_wait(evidence)[1] if _still_waits(live) else high


def _measured(batches_per_s: float, wait_share: float) -> str:
    return f"{number(batches_per_s)} batches/s, waiting for data {percent(wait_share)} of the measured time"


# --------------------------------------------------------------------------- in words and as settings

Value = str | int | float | bool | None

# torch's default, which a loader without workers does not have.
_DEFAULT_PREFETCH = 2


def changes(live: LiveRecord) -> dict[str, tuple[Value, Value]]:
    """The settings that live tuning changed, with old and new value; none where it left the loader alone."""
    if live.state == "left_alone":
        return {}
    changed = {}
    for field in fields(Settings):
        before, after = getattr(live.before, field.name), getattr(live.settings, field.name)
        default = _DEFAULT_PREFETCH if field.name == "prefetch_factor" else None
        if (before or default) != (after or default):
            changed[field.name] = before, after
    return changed


def on_trial(live: LiveRecord) -> Settings | None:
    """The settings whose trial had not ended when the record was written."""
    trying = live.state == "trying" and live.moves and live.moves[-1].outcome == "trying"
    return live.moves[-1].settings if trying else None


def settings_words(settings: Settings) -> str:
    """``4 workers, prefetch 2``."""
    prefetch = settings.prefetch_factor or _DEFAULT_PREFETCH
    return loader_settings(settings.num_workers or 0, prefetch, settings.pin_memory)


def live_settings(live: LiveRecord | None) -> tuple[tuple[str, Value], ...]:
    """What live tuning did, as settings: ``live.num_workers`` of "0 → 4", and why."""
    if live is None:
        return ()
    changed = [
        (f"live.{name}", f"{_plain(before)} → {_plain(after)}") for name, (before, after) in changes(live).items()
    ]
    note = (("live.note", live.note),) if live.note else ()
    why = _on_trial_at_the_end(live) or live.why
    return (("live", live.state), ("live.why", why), *changed, *note, ("live.moves", len(live.moves)))


def live_words(live: LiveRecord) -> str:
    """What live tuning did, in a few words."""
    if live.state == "left_alone":
        return "; ".join(filter(None, (f"live tuning left the loader alone: {live.why}", live.note)))
    changed = ", ".join(f"{name} {_plain(before)} → {_plain(after)}" for name, (before, after) in changes(live).items())
    trial = _on_trial_at_the_end(live)
    if not changed and not trial:
        done = "kept the script's settings" if live.note else "changed nothing"
        return "; ".join(filter(None, (f"live tuning {done}: {live.why}", live.note)))
    gain = ""
    before, after = live.before_batches_per_s, live.batches_per_s
    if changed and before and after and live.before_wait_share is not None and live.wait_share is not None:
        wait = f"data wait {percent(live.before_wait_share)} → {percent(live.wait_share)} of the measured time"
        gain = f"{times(after / before)} as many batches a second ({number(after)}), {wait}"
    if changed and live.ranks > 1:
        changed += f" (each of {live.ranks} ranks)"
    first, *rest = filter(None, (changed, gain, trial, live.note))
    return "; ".join((f"live tuning: {first}", *rest))


def _on_trial_at_the_end(live: LiveRecord) -> str:
    settings = on_trial(live)
    if settings is None:
        return ""
    return f"{settings_words(settings)} {'was' if settings.num_workers == 1 else 'were'} on trial at the end"


def _plain(value: Value) -> str:
    if value is None:
        return "default"
    return ("on" if value else "off") if isinstance(value, bool) else str(value)
