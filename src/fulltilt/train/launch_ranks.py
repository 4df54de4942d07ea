"""`fulltilt train --gpus N`: starts one process a GPU, passes signals on, and ends all of them together."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence

from fulltilt.errors import UsageError
from fulltilt.probes.host import cpu_capacity
from fulltilt.train.distributed import detect, device_of
from fulltilt.train.stop import stop_signals_to

_TICK_S = 0.1
# How long ranks have to end by themselves after another one has failed.
_PATIENCE_S = 30.0


def relaunch(gpus: int, device: str = "auto", command: Sequence[str] | None = None) -> int | None:
    """Run ``command`` (by default our own) as ``gpus`` ranks on this machine and return the exit code of the whole.

    None means: train in this process; one GPU is enough, or a launcher has started the ranks. Raises UsageError.
    """
    if gpus < 1:
        raise UsageError(f"gpus should be at least 1, not {gpus}")
    if gpus == 1 or detect().world > 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        return None
    device_of(device, gpus - 1)  # refuses more ranks than there are GPUs
    return _run_ranks(list(command or [sys.executable, *sys.orig_argv[1:]]), gpus)


def _run_ranks(command: list[str], count: int) -> int:
    """Start the ranks and wait for them. The code of the first one that fails is the code of the job.

    torchrun's own agent would take the signals for itself and answer every failure with code 1.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "OMP_NUM_THREADS": str(max(int(cpu_capacity().usable) // count, 1)),  # left alone each would take all CPUs
        **os.environ,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
    }
    ranks: list[subprocess.Popen[bytes]] = []
    failed: int | None = None
    kill_at_s = math.inf

    def pass_on(number: int, _frame: object) -> None:  # the ranks decide: they save and exit 3
        for rank in ranks:
            rank.send_signal(number)

    with stop_signals_to(pass_on):
        try:
            for number in range(count):
                env = {**shared, "RANK": str(number), "LOCAL_RANK": str(number)}
                # In a session of its own: Ctrl-C in the terminal comes through us, once.
                ranks.append(subprocess.Popen(command, env=env, start_new_session=True))
            while None in (codes := [rank.poll() for rank in ranks]):
                if failed is None and (failed := next(filter(None, codes), None)) is not None:
                    pass_on(signal.SIGTERM, None)
                    kill_at_s = time.monotonic() + _PATIENCE_S
                if time.monotonic() > kill_at_s:
                    break
                time.sleep(_TICK_S)
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
                    rank.wait()
    code = failed or next(filter(None, codes), 0)
    return 128 - code if code < 0 else code
