"""Running a data set's own code in a process of its own, as its workers will.

What it does in this process would be inherited by every worker forked later: handles that it opened, and threads of a
library (those of a convolution on Arm, say) that a fork does not copy and that the worker then waits for for ever.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import signal
from collections.abc import Callable
from multiprocessing import connection
from typing import Any, TypeVar

from fulltilt.errors import FulltiltError, MachineError
from fulltilt.feed.forked import become_worker
from fulltilt.feed.memory import start_method
from fulltilt.feed.pool import no_processes

# Some data sets read an index of all their files first.
PATIENCE_S = 300.0

Result = TypeVar("Result")


def apart(call: Callable[[], Result], workers: int, dataset: Any = None) -> Result:
    """What ``call`` returns, called in a fork where workers are to run it too; raises what it raises of ours.

    Without workers, without fork, and for results that cannot be sent, it is called here.
    """
    if not workers or start_method() != "fork":
        return call()
    context = multiprocessing.get_context("fork")
    try:
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_answer, args=(call, theirs, workers, dataset), name="fulltilt-feed-look", daemon=True
        )
        process.start()
    except OSError as refused:
        raise no_processes(workers, refused) from refused
    theirs.close()
    try:
        if not mine.poll(PATIENCE_S):
            process.kill()
            raise MachineError(
                f"the data set gave no sample in a process of its own within {PATIENCE_S:.0f} s",
                "It may wait for a thread, which no fork copies: make pools where they are used, or have no workers.",
            )
        kind, *answer = pickle.loads(mine.recv_bytes())
    except EOFError:
        process.join()
        raise MachineError(
            f"the data set's own code ended its process with exit code {process.exitcode}",
            "Run once with num_workers=0 to see where.",
        ) from None
    finally:
        mine.close()
        if process.is_alive():
            process.join(1.0)
            process.kill()
        process.join()
    if kind == "error":
        error: FulltiltError = answer[0].__new__(answer[0])
        FulltiltError.__init__(error, *answer[1:3])
        for note in answer[3]:
            error.add_note(note)
        raise error
    return answer[0] if kind == "result" else call()


def _answer(call: Callable[[], Any], to: connection.Connection, workers: int, dataset: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    become_worker(0, workers, dataset)
    try:
        answer: tuple[Any, ...] = ("result", call())
    except FulltiltError as error:
        answer = ("error", type(error), error.what, error.remedy, getattr(error, "__notes__", []))
    except Exception:
        answer = ("unsent",)  # raised again where it is called once more
    try:
        sent = pickle.dumps(answer)
    except Exception:
        sent = pickle.dumps(("unsent",))
    with contextlib.suppress(OSError):
        to.send_bytes(sent)
