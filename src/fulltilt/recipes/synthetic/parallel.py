"""Files written by several processes at once, in pieces that do not depend on how many there are."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed

from fulltilt.probes.host import cpu_capacity

# Long enough that handing pieces out costs nothing, short enough for a bar that moves.
PIECE = 50


def spread(write: Callable[[range], None], size: int) -> Iterator[int]:
    """Call ``write`` with every piece of ``range(size)`` in some process; yields how many samples are done so far."""
    pieces = [range(first, min(first + PIECE, size)) for first in range(0, size, PIECE)]
    processes = min(int(cpu_capacity().usable), len(pieces))
    done = 0
    if processes < 2:
        for piece in pieces:
            write(piece)
            done += len(piece)
            yield done
        return
    start = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context(start), initializer=_end_with_the_parent)
    try:
        waiting = {pool.submit(write, piece): len(piece) for piece in pieces}
        for finished in as_completed(waiting):
            finished.result()
            done += waiting[finished]
            yield done
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C or a full disk, what is begun is waited for and nothing else


def _end_with_the_parent() -> None:
    """Leave Ctrl-C to the parent, and do not outlive it: a killed one cannot tell."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
