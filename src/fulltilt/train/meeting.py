"""How the ranks of one start of a job find each other in a store that outlives the start.

torchrun keeps its store over restarts, and the hosts of an elastic job count their restarts differently: a rank that
is early would read the addresses of dead predecessors. So the first rank draws a name for this start and hands it to
those who are alive: each of them asks under a name of its own that nobody has used before.
"""

from __future__ import annotations

import datetime
import os
import time
import uuid
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from fulltilt.train import slurm

_LOOK_AGAIN_S = 0.02


def own_store(rank: int, world: int, timeout: datetime.timedelta) -> Any:
    """The launcher's store, with a corner for this start of the job. Raises RuntimeError when ranks stay away."""
    for name, value in slurm.torch_environment(os.environ).items():
        os.environ.setdefault(name, value)  # torch looks for the first rank's address there
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store: Any = dist.TCPStore(address, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined, unused-ignore]
    else:
        store, _, _ = next(rendezvous("env://", rank, world, timeout=timeout))
    name = agree_on_name(store, rank, world, timeout.total_seconds())
    return dist.PrefixStore(f"fulltilt/start-{name}", store)  # type: ignore[attr-defined, unused-ignore]


def agree_on_name(store: Any, rank: int, world: int, timeout_s: float) -> str:
    """A name that only the living ranks of this start know. Raises RuntimeError when not all come in time."""
    corner = f"fulltilt/ranks-{world}"
    own = uuid.uuid4().hex
    if rank:
        store.set(f"{corner}/asks-{rank}", own)
        name: str = store.get(f"{corner}/answer-{own}").decode()  # waits for it
        store.set(f"{corner}/{name}-knows-{rank}", "")
        return name
    absent = set(range(1, world))
    deadline_s = time.monotonic() + timeout_s
    while absent:
        for other in sorted(absent):
            if store.check([f"{corner}/{own}-knows-{other}"]):
                absent.discard(other)
            elif store.check([f"{corner}/asks-{other}"]):
                # It may be the question of a dead predecessor; then nobody reads the answer, and we look again.
                store.set(f"{corner}/answer-{store.get(f'{corner}/asks-{other}').decode()}", own)
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{len(absent)} of {world} ranks did not come, among them rank {min(absent)}")
        time.sleep(_LOOK_AGAIN_S)
    return own
