"""The recorder of a process that attached itself, known here to what a session is built on."""

from __future__ import annotations

from typing import Protocol


class Recording(Protocol):
    """A recorder that can be told to stay out of the way."""

    active: bool


recorder: Recording | None = None
