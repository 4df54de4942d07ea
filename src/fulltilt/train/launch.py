"""How a training starts and ends for its user: one process a GPU, an exit code, at most three lines of error."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import psutil
import torch.distributed as dist

from fulltilt import store
from fulltilt.errors import Diverged, DoesNotFit, FulltiltError, MachineError, StoppedEarly, UsageError, refused_path
from fulltilt.probes.host import cpu_capacity
from fulltilt.train import checkpoint, checkpoint_files
from fulltilt.train.checkpoint import newest_complete
from fulltilt.train.distributed import Ranks, detect, lost_contact
from fulltilt.train.guards import RankDoesNotFit, explain_dead_worker, worker_limits
from fulltilt.train.stop import ignored_by_nohup, was_interrupted

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


def job_exit_code(codes: Iterable[int]) -> int:
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
                outcome.append(job_exit_code(failure.exitcode for failure in error.failures.values()))
            except BaseException as error:  # raised where it is seen
                outcome.append(error)

        # On the main thread the agent would take the signals for itself, and kill a rank that saves for 30 seconds.
        agent = threading.Thread(target=run, name="fulltilt-torchrun")
        with _SignalForwarding() as signals, _quiet_agent():
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


class _SignalForwarding:
    """Within it, signals go to the ranks, which decide: they save and exit 3. Each rank has a session of its own."""

    def __init__(self) -> None:
        self._waiting: list[int] = []
        self._others = psutil.Process().children()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _SignalForwarding:
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


# --------------------------------------------------------------------------- the end


INTERRUPTED = 130
_OUTSIDE = "interrupted before or after training; no step is lost"
LOST = MachineError.exit_code
# A rank that lost another waits so long: the launcher should see first how that one ended, and ends us then.
_AFTER_YOU_S = 5.0
# What all ranks meet together; the first one says it.
_SHARED = (StoppedEarly, Diverged, DoesNotFit)


def exit_code_of(body: Callable[[], object], out: Path, stream: TextIO | None = None) -> int:
    """Run ``body`` and return the exit code of the run in ``out``; errors are told in at most three lines."""
    ranks = detect()
    silent = False
    try:
        body()
    except FulltiltError as error:
        lines = [error.what, error.remedy or ""]
        code = error.exit_code
        silent = _told_by_another(error, ranks)
        # What was refused before the run had a folder leaves none behind: the lines say all of it.
        if not isinstance(error, StoppedEarly) and out.is_dir():
            _log_traceback(out)
    except KeyboardInterrupt as error:
        # The first one while it trains is a request to stop, which saves; only the second comes here, with a word.
        lines = ["interrupted a second time; the last step was not saved" if error.args else _OUTSIDE]
        code = INTERRUPTED
    except Exception as error:  # the user's own code, or a bug of ours: the log has the details
        said = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
        log = _log_traceback(out, elsewhere=True)
        lines, code = [f"{said} (in {_place_of(error)}; all of it is in {log})"], 1
        refusal: FulltiltError | None = refused_path(error) or checkpoint_files.refused_write(error, out)
        if refusal is None and "DataLoader worker" in str(error):  # torch raises a death wherever the thread stands
            limits = worker_limits()
            refusal = explain_dead_worker(error, limits, limits)
        if refusal is not None:
            lines, code = [refusal.what, refusal.remedy or ""], refusal.exit_code
        if ranks.world > 1 and lost_contact(error):
            lines, code = ["lost contact with another rank", f"Look for what that one said. Ours is in {log}."], LOST
            time.sleep(_AFTER_YOU_S)
        if was_interrupted():  # what was being imported is left half done, and fails whoever comes next
            lines, code = [_OUTSIDE], INTERRUPTED
    else:
        return 0
    if silent:
        return code  # together with the others
    told = [line.replace(":\n", ": ").replace("\n", "; ") for line in lines if line]
    if ranks.rank:
        told[0] = f"rank {ranks.rank}: {told[0]}"
    resumable, goes_on = _newest_checkpoint(out)
    if resumable is not None:
        # After a refusal the same command would be refused again.
        again = "; the same command resumes there" if goes_on and code != UsageError.exit_code else ""
        told.append(f"Newest checkpoint: {resumable}{again}.")
    print(f"fulltilt: {told[0]}", *(f"  {line}" for line in told[1:]), sep="\n", file=stream or sys.stderr, flush=True)
    if ranks.world > 1 and dist.is_initialized():
        # NCCL was left as it is (see Group.close), and the interpreter's own end would wait for it.
        sys.stdout.flush()
        os._exit(code)
    return code


def _told_by_another(error: FulltiltError, ranks: Ranks) -> bool:
    """A wrong setting is told once on each machine, since the machines may differ."""
    if isinstance(error, UsageError):
        return ranks.local_rank > 0
    return isinstance(error, _SHARED) and not isinstance(error, RankDoesNotFit) and ranks.rank > 0


def _newest_checkpoint(out: Path) -> tuple[Path | None, bool]:
    """The newest checkpoint that is whole, and whether a run that goes on takes it.

    It does not where a later one needs a newer Fulltilt: that is refused, not passed over.
    """
    root = out / "checkpoints"
    with contextlib.suppress(OSError):  # what keeps us out of the folder has been told
        try:
            found = newest_complete(root).checkpoint
            return (None if found is None else found.folder), True
        except FulltiltError:
            for folder in checkpoint.folders(root):
                with contextlib.suppress(FulltiltError):
                    return checkpoint.verify(folder).folder, False
    return None, False


def _log_traceback(out: Path, *, elsewhere: bool = False) -> Path | None:
    """Append it to ``error.log`` in ``out``, or to one in a new temporary folder where ``out`` is not ours."""
    path = out / "error.log"
    with contextlib.suppress(OSError, FulltiltError):
        if (folder := store.OwnedFolder.around(path)) is not None:
            with os.fdopen(folder.append(path), "a", encoding="utf-8") as file:
                traceback.print_exc(file=file)
            return path
    if elsewhere:
        with contextlib.suppress(OSError):
            path = Path(tempfile.mkdtemp(prefix="fulltilt-")) / "error.log"
            path.write_text(traceback.format_exc(), encoding="utf-8")
            return path
    return None


def _place_of(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "an unknown place"
