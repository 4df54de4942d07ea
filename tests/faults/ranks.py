"""Several ranks of the victim's job on this machine, over gloo."""

from __future__ import annotations

import socket
import time
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.faults import victim
from tests.faults.victim import Order


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def start(out: Path, world: int, **order: Any) -> list[BaseProcess]:
    """Start all ranks."""
    port = free_port()
    return [victim.start(Order(out, rank=rank, world=world, port=port, **order)) for rank in range(world)]


def run_as_torchrun(children: list[BaseProcess], timeout_s: float = 150) -> list[int | None]:
    """Wait for all ranks; when one of them fails, kill the others, as torchrun does. The codes of all.

    Ranks that are still alive at the time limit have the code None: they hung.
    """
    deadline = time.monotonic() + timeout_s
    hung: list[BaseProcess] = []
    while any(child.is_alive() for child in children):
        connection.wait([child.sentinel for child in children if child.is_alive()], timeout=1)
        if time.monotonic() > deadline or any(child.exitcode for child in children):
            hung = [child for child in children if child.is_alive()] if time.monotonic() > deadline else []
            for child in children:
                child.kill()
                child.join()
    return [None if child in hung else child.exitcode for child in children]


def exit_codes(out: Path, world: int, timeout_s: float = 150, **order: Any) -> list[int | None]:
    """Run all ranks to their end. A rank still alive at the time limit is killed and has the code None."""
    children = start(out, world, **order)
    deadline = time.monotonic() + timeout_s
    for child in children:
        child.join(max(deadline - time.monotonic(), 0.1))
    codes = [child.exitcode for child in children]
    for child in children:
        if child.is_alive():
            child.kill()
            child.join()
    return codes
