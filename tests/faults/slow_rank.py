"""Jobs of two hosts with two ranks each, one of which may be slow: ``python -m tests.faults.slow_rank OUT KIND RANK``.

The hosts are names only. All ranks are forked from this process, which has imported torch: a job takes seconds.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch._dynamo  # by each rank otherwise
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import fulltilt
import fulltilt.report.page

RANKS, BATCH = 4, 8
KINDS = ("cpu", "data", "sleep")
EXTRA_S = 0.025
# From this step on the rank that is to be stopped stays at one line.
STOPS_AT = 40


class Samples(Dataset[Any]):
    def __init__(self, steps: int, slow: bool, uneven: int | None) -> None:
        self.steps, self.slow, self.uneven = steps, slow, Random(uneven) if uneven is not None else None

    def __len__(self) -> int:
        return self.steps * BATCH * RANKS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.slow:
            time.sleep(EXTRA_S / BATCH)
        if self.uneven is not None and self.uneven.random() < 0.25 / BATCH:  # one batch in four, on any rank
            time.sleep(2 * EXTRA_S)
        return torch.full((256,), float(index % 7)), index % 4


def work(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        sum(range(100))


def train(kind: str, slow: bool, steps: int, rank: int) -> None:
    samples = Samples(steps, slow and kind == "data", rank if kind == "uneven" else None)
    loader = DataLoader(samples, BATCH, sampler=DistributedSampler(samples, shuffle=False))
    network = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 4))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (inputs, labels) in enumerate(loader):
        if slow and kind == "sleep":
            time.sleep(EXTRA_S)
        if slow and kind == "stop":
            time.sleep(EXTRA_S if step < STOPS_AT else 300)  # <- here
        if slow and kind == "cpu":
            work(EXTRA_S)
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def run_rank(out: Path, kind: str, slow: int | None, steps: int, rank: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "TORCHELASTIC_RUN_ID": out.name}
    socket.gethostname = lambda: f"host{rank // 2}"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}.store", rank=rank, world_size=RANKS)
    with fulltilt.record(out, "job"):
        train(kind, rank == slow, steps, rank)
    dist.destroy_process_group()


def run_job(out: Path, kind: str, slow: int | None, steps: int = 60) -> None:
    """Run one job to its end. Raises RuntimeError when a rank fails."""
    sys.stdout.flush()
    pids = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                run_rank(out, kind, slow, steps, rank)
                code = 0
            finally:
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    if any(os.waitpid(pid, 0)[1] for pid in pids):
        raise RuntimeError(f"a rank of {out} failed")


if __name__ == "__main__":
    many = 1_000_000 if sys.argv[2] == "stop" else 60
    run_job(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else None, many)
