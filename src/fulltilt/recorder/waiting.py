"""Where a thread waits for others: another thread, a process, or what an event loop has under way."""

from __future__ import annotations

import multiprocessing
import queue
import selectors
import subprocess
import threading
from collections.abc import Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from types import CodeType

from fulltilt.recorder.owners import owner

# Of threads and processes: waiting for their beginning or their end brings no batch.
BRING_NONE = frozenset({"__init__", "start", "join"})


@cache
def _waiting_rooms() -> frozenset[str]:
    processes = Path(multiprocessing.__file__).parent
    rooms = (processes / f"{name}.py" for name in ("connection", "popen_fork", "queues", "synchronize"))
    return frozenset({threading.__file__, queue.__file__, selectors.__file__, subprocess.__file__, *map(str, rooms)})


def waits_for_others(code: CodeType) -> bool:
    """Whether a thread in this code waits."""
    return code.co_filename in _waiting_rooms()


def may_bring_a_batch(codes: Sequence[CodeType]) -> bool:
    """Whether a wait may end with a batch, by the stack from its innermost call on."""
    library = takewhile(lambda code: owner(code.co_filename) == "stdlib", codes)
    return not any(code.co_name in BRING_NONE or code.co_filename == subprocess.__file__ for code in library)
