"""Recording by hand: ``with fulltilt.record("runs/a") as rec`` for those who would rather write it than attach."""

from __future__ import annotations


def record() -> None:
    """Placeholder."""
