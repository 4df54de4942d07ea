"""Ways to leave a process that run no exit handler: the record is written first, and then the process leaves as asked.

A kill cannot be met. These can, because Python code calls them: a handler of SIGTERM, a watchdog, a forked child.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from fulltilt.recorder.patches.exchange import Exchange
from fulltilt.recorder.recorder import Recorder

# Whoever leaves at once may do so because something hangs, and a lock that is never let go would hang us too.
PATIENCE_S = 3.0


class ExitPatches:
    """Has the record written before os._exit, os.abort and os.exec*."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        # Told the status before the process leaves. Where a run is recorded by hand, its folder is closed as well.
        self.write_record: Callable[[int], None] = lambda _: recorder.finish()

    def install(self, exchange: Exchange) -> None:
        """Stand at the functions of os that end this program."""
        exchange.swap(os, "_exit", self._leaving)
        exchange.swap(os, "abort", self._leaving)
        # The other six forms end in these two. The program that follows goes on with the record.
        for name in ("execv", "execve"):
            exchange.swap(os, name, self._replacing)

    def _leaving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def leave(*status: int) -> Any:
            self._before_leaving(lambda: self.write_record(status[0] if status else -signal.SIGABRT))
            return original(*status)

        return leave

    def _replacing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def execute(*args: Any, **kwargs: Any) -> Any:
            self._before_leaving(self._recorder.flush)
            return original(*args, **kwargs)  # may fail, and then the job goes on

        return execute

    def _before_leaving(self, write: Callable[[], None]) -> None:
        recorder = self._recorder
        if not recorder.active or os.getpid() != recorder.pid:
            return  # a loader's worker, or a child that was forked
        # Whatever happens here, and it may happen inside a signal handler: the process leaves.
        with contextlib.suppress(BaseException):
            if recorder.mine():
                recorder.wake()
            writer = threading.Thread(target=write, name="fulltilt-leaving", daemon=True)
            writer.start()
            writer.join(PATIENCE_S)
