"""Fulltilt: finds out why a PyTorch training job leaves its GPU idle, fixes it, and proves the fix.

The names below are loaded when they are first used, so that ``import fulltilt`` stays fast and imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fulltilt import feed as feed
    from fulltilt.diagnosis import diagnose as diagnose
    from fulltilt.recorder.manual_recording import record as record
    from fulltilt.store import load as load

_HOME = {
    "load": "fulltilt.store",
    "diagnose": "fulltilt.diagnosis",
    "record": "fulltilt.recorder.manual_recording",
}

__all__ = ["__version__", "diagnose", "feed", "load", "record"]


def load_ipython_extension(shell: Any) -> None:
    """What ``%load_ext fulltilt`` calls: adds the magics ``%%fulltilt`` and ``%fulltilt``."""
    importlib.import_module("fulltilt.integrations.notebook").register(shell)


def __getattr__(name: str) -> Any:
    if name == "feed":
        return importlib.import_module("fulltilt.feed")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'fulltilt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
