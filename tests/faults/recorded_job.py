"""A small data-parallel job on the CPU: ``python -m tests.faults.recorded_job STEPS``."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def main(steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loader = DataLoader(TensorDataset(torch.randn(8 * steps, 64), torch.randint(4, (8 * steps,))), 8)
    model = DistributedDataParallel(torch.nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.02)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
