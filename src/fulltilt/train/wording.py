"""The lines a training run prints, to the letter where the guides give them. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def epoch_time(seconds: float, samples: int, batches: int) -> str:
    """``Epoch time: 120s (412 samples/sec, 3.2 batches/sec)``."""
    safe_s = max(seconds, 1e-9)
    steps = batches / safe_s
    told = f"{steps:.1f}" if steps >= 1 else rate(steps)
    return f"Epoch time: {seconds:.0f}s ({rate(samples / safe_s)} samples/sec, {told} batches/sec)"


def rate(per_s: float) -> str:
    """``412``; of a slow one two digits, since 0 would say that nothing moved."""
    return f"{per_s:.0f}" if per_s >= 9.95 else f"{per_s:.2g}"


def batch_size(in_force: int, asked: int) -> str:
    """``Batch size: 128 (expected: 128)``."""
    return f"Batch size: {in_force} (expected: {asked})"


def loader_profile(waits_s: list[float]) -> str:
    """``[TRAIN PROFILE] DataLoader avg: 25.3ms, max: 78.1ms``."""
    mean_s = sum(waits_s) / len(waits_s) if waits_s else 0.0
    return f"[TRAIN PROFILE] DataLoader avg: {1e3 * mean_s:.1f}ms, max: {1e3 * max(waits_s, default=0.0):.1f}ms"


def duration(seconds: float) -> str:
    """``45s``, ``3m05s`` or ``2h07m``."""
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def bar(done: int, total: int | None, width: int = 20) -> str:
    """``[██████····] 60%``; only a count when the total is not known."""
    if not total:
        return f"step {done}"
    filled = min(width * done // total, width)
    return f"[{'█' * filled}{'·' * (width - filled)}] {min(100 * done // total, 100):3d}%"


def metrics(values: dict[str, float]) -> str:
    """``train_loss 0.1234, eval_accuracy 0.9``."""
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())


def watched_metric(values: Mapping[str, float], watched: str | None) -> tuple[str, float] | None:
    """The metric worth a place beside the bar: the watched one, else the first of the evaluation that is no loss."""
    if watched is not None:
        name = f"eval_{watched.removeprefix('eval_')}"
        return (name, values[name]) if name in values else None
    found = (pair for pair in values.items() if pair[0].startswith("eval_") and pair[0] != "eval_loss")
    return next(found, None)
