"""Collectives and DDP, the list of threads, and how uncaught errors are shown."""

from __future__ import annotations

import sys
import threading
import weakref
from types import TracebackType
from typing import Any

from fulltilt.recorder.hooks import Function, Patches, timed
from fulltilt.recorder.marks import Activity
from fulltilt.recorder.recorder import Recorder
from fulltilt.recorder.stacks.frames import users_line
from fulltilt.recorder.user_code import leave_out_ours
from fulltilt.records import CommunicationRecord

COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single"),
    *("barrier", "broadcast", "broadcast_object_list", "gather", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
    *("scatter", "all_gather_single", "reduce_scatter_single"),  # the last two: torch 2.15's names of …_tensor
)


def watch_ranks(patches: Patches, torch: Any, recorder: Recorder) -> None:
    """Mark collectives, and remember DDP's replicas, which measure themselves."""

    is_compiling = torch.compiler.is_compiling

    def collective(original: Function) -> Function:
        measured = timed(recorder, original, Activity.COMMUNICATION)

        def call(*args: Any, **kwargs: Any) -> Any:
            return (original if is_compiling() or kwargs.get("async_op") else measured)(*args, **kwargs)

        return call

    def wait(original: Function) -> Function:
        """On a GPU the host goes on at once: its stream waits."""

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            waits = recorder.activity in (Activity.USER, Activity.BACKWARD) and recorder.clock is None
            if not waits or not recorder.on_training_thread():
                return original(work, *args, **kwargs)
            if recorder.state.communication is None:
                recorder.state.communication = CommunicationRecord()
            before = recorder.switch(Activity.COMMUNICATION)
            try:
                return original(work, *args, **kwargs)
            finally:
                recorder.switch(before)

        return wait

    def constructed(original: Function, replica: Any, *args: Any, **kwargs: Any) -> None:
        original(replica, *args, **kwargs)
        if recorder.active:
            recorder.state.replicas.append(weakref.ref(replica))
            recorder.state.replicas_where, _ = users_line()
            if replica.device_type == "cpu":
                # On a GPU its default, every 100th step, stays: reading the timers there costs a wait.
                replica._set_ddp_runtime_logging_sample_rate(10)

    patches.around(torch.nn.parallel.DistributedDataParallel, "__init__", constructed)
    if hasattr(torch.distributed, "Work"):
        patches.swap(torch.distributed.Work, "wait", wait)
    for name in COLLECTIVES if torch.distributed.is_available() else ():
        if hasattr(torch.distributed, name):
            patches.swap(torch.distributed, name, collective)


def hide_our_threads(patches: Patches) -> None:
    """Show the script its own threads only: it may wait until all have ended, which ours do after it."""
    every = threading.enumerate

    def theirs(_: Function) -> list[threading.Thread]:
        # A derived class may have a name of its own.
        return [thread for thread in every() if not str(vars(thread).get("_name")).startswith("fulltilt-")]

    patches.around(threading, "enumerate", theirs)
    patches.around(threading, "active_count", lambda original: len(theirs(original)))


def show_errors_without_ours(patches: Patches) -> None:
    """Show uncaught errors of the process and its threads without our frames. Hooks of the script's own stay."""
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
    patches.undo_by(restore)
