"""Attaching to an unchanged job: waits until torch is imported, then records into the run folder.

`fulltilt run` sets the environment variables that control it, and every Python process of the job inherits them.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from fulltilt.recorder import user_code
from fulltilt.recorder.import_watcher import ITERABLES, ImportWatcher

if TYPE_CHECKING:
    from fulltilt.recorder.session import Session

RUN_DIR = "FULLTILT_RUN_DIR"
T0_NS = "FULLTILT_T0_NS"
SETTINGS = "FULLTILT_SETTINGS"
DEEP = "FULLTILT_DEEP"
PACKAGE = "FULLTILT_PACKAGE"
# Names of other modules, separated by commas: ``attach(session)`` of each is called in each process of the job.
ALSO = "FULLTILT_ALSO"

current: Session | None = None
# The variables of `fulltilt run` as the process began: a script may empty its environment before it imports torch.
_variables: dict[str, str] = {}
# How many CPUs this process may use, before the script has set anything.
_cpus_at_start: int | None = None
_forks_are_followed = False


def environment(folder: Path, t0_ns: int, settings: Path | None, deep: int) -> dict[str, str]:
    """The variables that make every Python process below attach itself to this run."""
    bootstrap = str(Path(__file__).parent / "bootstrap")
    path = os.environ.get("PYTHONPATH")
    variables = {
        RUN_DIR: str(folder.resolve()),
        T0_NS: str(t0_ns),
        PACKAGE: str(Path(__file__).resolve().parents[2]),
        "PYTHONPATH": bootstrap if not path else f"{bootstrap}{os.pathsep}{path}",
    }
    if settings is not None:
        variables[SETTINGS] = str(settings.resolve())
    if deep:
        variables[DEEP] = str(deep)
    # The profiler's own messages are not the job's output.
    variables["KINETO_LOG_LEVEL"] = os.environ.get("KINETO_LOG_LEVEL", "99")
    return variables


def when_torch_is_imported() -> None:
    """Start a session as soon as this process has imported torch."""
    global _cpus_at_start
    with contextlib.suppress(AttributeError, OSError):  # this runs before the job, which no error here may end
        _cpus_at_start = len(os.sched_getaffinity(0))
    _variables.update((name, value) for name, value in os.environ.items() if name.startswith("FULLTILT_"))
    user_code.began_in()  # before the script goes elsewhere
    sys.meta_path.insert(0, ImportWatcher({"torch": start, **dict.fromkeys(ITERABLES, _watch_iterables)}))
    if "torch" in sys.modules:
        start(sys.modules["torch"])


def start(torch: ModuleType) -> None:
    """Record this process into the folder that the environment names. Never raises."""
    global current
    if current is not None:
        return
    try:
        from fulltilt.recorder.session import Session

        current = Session(
            torch,
            folder=Path(_variables[RUN_DIR]),
            t0_ns=int(_variables.get(T0_NS) or time.perf_counter_ns()),
            settings=_variables.get(SETTINGS),
            deep=int(_variables.get(DEEP) or 0),
        )
        current.state.cpus_at_start = _cpus_at_start
        current.install()
        _finish_with_process()
        for name in filter(None, _variables.get(ALSO, "").split(",")):
            importlib.import_module(name).attach(current)
    except Exception as error:
        if os.environ.get("FULLTILT_DEBUG"):
            raise
        print(f"fulltilt: cannot record this process: {error}", file=sys.stderr)


def _watch_iterables(module: ModuleType) -> None:
    """A library was imported; one that comes before torch is found when torch comes."""
    if current is not None:
        current.watch_iterables(module)


def _finish_with_process() -> None:
    from multiprocessing import util  # torch has imported it; this file is also read where torch is not

    global _forks_are_followed
    atexit.register(_finish)
    if not _forks_are_followed:
        _forks_are_followed = True
        os.register_at_fork(after_in_child=_record_child)
        # multiprocessing's processes end without exit handlers, and drop finalizers when they are forked.
        util.register_after_fork(sys.modules[__name__], lambda _: util.Finalize(None, _finish, exitpriority=100))


def _finish() -> None:
    if current is not None:
        current.finish()


def _record_child() -> None:
    """In a forked child, which may train itself, as ranks that a notebook forks do."""
    global current
    if current is None:
        return
    current.recorder.active = False
    if not current.loaders.starting_workers:
        current.restore()
        current.observer.switch_interval.restore()
        current = None
        start(sys.modules["torch"])
