"""`gpus: N`: the same command once more for each GPU of this machine, under torchrun's own agent.

Under an outer torchrun or Slurm there is nothing to start: the processes are there already.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import psutil

from fulltilt.errors import UsageError
from fulltilt.probes.host import cpu_capacity
from fulltilt.train.distributed import detect
from fulltilt.train.stop import ignored_by_nohup

# What others may send to the command and mean for the training.
_FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
_TICK_S = 0.25


def relaunch(gpus: int, device: str = "auto", command: Sequence[str] | None = None) -> int | None:
    """Run ``command`` (by default our own) as ``gpus`` ranks on this machine and return the exit code of the whole.

    None means: train in this process; one GPU is enough, or a launcher has started the ranks. Raises UsageError.
    """
    if gpus < 1:
        raise UsageError(f"gpus should be at least 1, not {gpus}")
    ranks = detect()
    if gpus == 1 or ranks.world > 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        return None
    _check_gpus(gpus, device)
    return _run_ranks(list(command or own_command()), gpus)


def own_command() -> list[str]:
    """The command line of this process, to be run again."""
    return [sys.executable, *sys.orig_argv[1:]]


def exit_code(codes: Iterable[int]) -> int:
    """The code of a job from those of its ranks, negative for a signal: the one that says most. Pure.

    A documented code beats the plain failure of ranks that lost their neighbour; a signal beats that failure too.
    """
    failed = [code for code in codes if code]
    documented = [code for code in failed if code > 1]
    signals = [128 - code for code in failed if code < 0]
    return next(iter([*documented, *signals, *(1 for _ in failed)]), 0)


def _check_gpus(gpus: int, device: str) -> None:
    import torch

    present = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if device == "cuda" and not present:
        raise UsageError("device: cuda, but torch sees no GPU", "Use device: auto, or see `fulltilt check`.")
    if present and gpus > present:
        raise UsageError(f"gpus: {gpus}, but torch sees {present}", "Lower gpus, or see `fulltilt check`.")


def _run_ranks(command: list[str], count: int) -> int:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    outcome: list[Any] = []
    with tempfile.TemporaryDirectory(prefix="fulltilt-ranks-") as logs, _threads_for(count):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )

        def run() -> None:
            try:
                elastic_launch(config, command[0])(*command[1:])
                outcome.append(0)
            except ChildFailedError as error:
                outcome.append(exit_code(failure.exitcode for failure in error.failures.values()))
            except BaseException as error:  # raised where it is seen
                outcome.append(error)

        # On the main thread the agent would take the signals for itself, and kill a rank that saves for 30 seconds.
        agent = threading.Thread(target=run, name="fulltilt-torchrun")
        with _Forwarding() as signals, _quiet_agent():
            agent.start()
            while agent.is_alive():
                agent.join(_TICK_S)
                signals.pass_on()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return int(outcome[0])


@contextlib.contextmanager
def _threads_for(count: int) -> Iterator[None]:
    """Within it, processes that start take their share of the CPUs; left alone each would take them all."""
    name = "OMP_NUM_THREADS"
    if name in os.environ:
        yield
        return
    os.environ[name] = str(max(int(cpu_capacity().usable) // count, 1))
    try:
        yield
    finally:
        del os.environ[name]


class _Forwarding:
    """Within it, signals go to the ranks, which decide: they save and exit 3. Each rank has a session of its own."""

    def __init__(self) -> None:
        self._waiting: list[int] = []
        self._others = psutil.Process().children()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Forwarding:
        if threading.current_thread() is threading.main_thread():
            numbers = [getattr(signal, name) for name in _FORWARDED if hasattr(signal, name)]
            wanted = [number for number in numbers if not ignored_by_nohup(number)]
            self._before = {number: signal.signal(number, self._on_signal) for number in wanted}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def pass_on(self) -> None:
        """Hand on what came before there was a rank to take it."""
        ranks = [child for child in psutil.Process().children() if child not in self._others] if self._waiting else []
        while ranks and self._waiting:
            number = self._waiting.pop(0)
            for rank in ranks:
                with contextlib.suppress(psutil.Error):
                    rank.send_signal(number)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._waiting.append(number)
        self.pass_on()


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """Keep torchrun's own account of a failed rank off the screen: the rank has said what happened."""
    logger = logging.getLogger("torch.distributed.elastic")
    if "LOGLEVEL" in os.environ:
        yield
        return
    silent = logging.NullHandler()
    before, logger.propagate = logger.propagate, False
    logger.addHandler(silent)
    try:
        yield
    finally:
        logger.propagate = before
        logger.removeHandler(silent)
