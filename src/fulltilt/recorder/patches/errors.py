"""Errors that nobody has caught are shown as they would be without us: our frames are left out of the traceback."""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import Any

from fulltilt.recorder.patches.exchange import Exchange
from fulltilt.recorder.tracebacks import leave_out_ours


class ErrorPatches:
    """Stands at the functions that show an error which nobody has caught."""

    def install(self, exchange: Exchange) -> None:
        """Those of the process and of its threads. A script that has hooks of its own meanwhile keeps them."""
        shows, shows_threads = sys.excepthook, threading.excepthook

        def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
            leave_out_ours(error)
            return shows(kind, error, error.__traceback__ if trace is not None else None)

        def show_thread(ended: Any) -> Any:
            leave_out_ours(ended.exc_value)
            trace = ended.exc_traceback and getattr(ended.exc_value, "__traceback__", None)
            return shows_threads(type(ended)((ended.exc_type, ended.exc_value, trace, ended.thread)))

        def restore() -> None:
            if sys.excepthook is show:
                sys.excepthook = shows
            if threading.excepthook is show_thread:
                threading.excepthook = shows_threads

        sys.excepthook, threading.excepthook = show, show_thread
        exchange.undo_by(restore)
