"""What live tuning did to the training loader, in words and as settings."""

from __future__ import annotations

from dataclasses import fields

from fulltilt.figures import count, number, percent, times
from fulltilt.records import LiveRecord, LoaderRecord, RankRecord, Settings

Value = str | int | float | bool | None

# torch's own depth of the queue, which a loader without workers does not name.
_DEFAULT_PREFETCH = 2


def live_record(rank: RankRecord | None, loader: LoaderRecord | None) -> LiveRecord | None:
    """The tuning of the training loader; None when the job ran without `--auto`."""
    if rank is None or not rank.live:
        return None
    wanted = loader.loader_id if loader is not None else None
    return next((live for live in rank.live if live.loader_id == wanted), rank.live[0])


def changes(live: LiveRecord) -> dict[str, tuple[Value, Value]]:
    """The settings that live tuning changed, each as it was and as it is; none where it left the loader alone."""
    if live.state == "left_alone":
        return {}
    pairs = {
        field.name: (getattr(live.before, field.name), getattr(live.settings, field.name)) for field in fields(Settings)
    }
    default = {"prefetch_factor": _DEFAULT_PREFETCH}
    return {
        name: (before, after)
        for name, (before, after) in pairs.items()
        if (before or default.get(name)) != (after or default.get(name))
    }


def on_trial(live: LiveRecord) -> Settings | None:
    """The settings whose trial had not come to its end when the record was written."""
    last = live.moves[-1] if live.moves else None
    return last.settings if last is not None and live.state == "trying" and last.outcome == "trying" else None


def settings_words(settings: Settings) -> str:
    """``4 workers, prefetch 2``."""
    if not settings.num_workers:
        return "no workers"
    pinned = ", pinned" if settings.pin_memory else ""
    return f"{count('worker', settings.num_workers)}, prefetch {settings.prefetch_factor or _DEFAULT_PREFETCH}{pinned}"


def live_settings(live: LiveRecord | None) -> tuple[tuple[str, Value], ...]:
    """What live tuning did, as settings: ``live.num_workers`` of "0 → 4", and why it stands there."""
    if live is None:
        return ()
    changed = [
        (f"live.{name}", f"{_plain(before)} → {_plain(after)}") for name, (before, after) in changes(live).items()
    ]
    note = (("live.note", live.note),) if live.note else ()
    why = _on_trial_at_the_end(live) or live.why
    return (("live", live.state), ("live.why", why), *changed, *note, ("live.moves", len(live.moves)))


def live_words(live: LiveRecord) -> str:
    """What live tuning did, in a few words for a line that has other things to say."""
    if live.state == "left_alone":
        return f"live tuning left the loader alone: {live.why}"
    changed = ", ".join(f"{name} {_plain(before)} → {_plain(after)}" for name, (before, after) in changes(live).items())
    trial = _on_trial_at_the_end(live)
    if not changed:
        return f"live tuning: {trial}" if trial else f"live tuning changed nothing: {live.why}"
    before, after = live.before_batches_per_s, live.batches_per_s
    if not before or not after or live.before_wait_share is None or live.wait_share is None:
        return f"live tuning: {changed}"
    wait = f"data wait {percent(live.before_wait_share)} → {percent(live.wait_share)}"
    gain = f"{times(after / before)} as many batches a second ({number(after)}), {wait}"
    return "; ".join(part for part in (f"live tuning: {changed}", gain, trial, live.note) if part)


def _on_trial_at_the_end(live: LiveRecord) -> str:
    settings = on_trial(live)
    if settings is None:
        return ""
    return f"{settings_words(settings)} {'was' if settings.num_workers == 1 else 'were'} on trial at the end"


def _plain(value: Value) -> str:
    return (
        {None: "default", True: "on", False: "off"}[value] if value is None or isinstance(value, bool) else str(value)
    )
