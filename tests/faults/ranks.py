"""Several ranks of the victim's job on this machine, over gloo."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

from tests.faults import victim
from tests.faults.victim import Order


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def exit_codes(out: Path, world: int, timeout_s: float = 60, **order: Any) -> list[int | None]:
    """Run all ranks to their end. A rank still alive at the time limit is killed and has the code None."""
    port = free_port()
    children = [victim.start(Order(out, rank=rank, world=world, port=port, **order)) for rank in range(world)]
    deadline = time.monotonic() + timeout_s
    for child in children:
        child.join(max(deadline - time.monotonic(), 0.1))
    codes = [child.exitcode for child in children]
    for child in children:
        if child.is_alive():
            child.kill()
            child.join()
    return codes
