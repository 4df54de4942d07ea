"""Ranks that the script itself starts, by spawning or, as in notebooks, by forking: no RANK in the environment."""

import json
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

RANKS = 2


def train(rank, meeting_point):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=RANKS)
    data = TensorDataset(torch.randn(96, 64), torch.randint(0, 4, (96,)))
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, RANKS, rank))
    model = DistributedDataParallel(torch.nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    steps = samples = 0
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for inputs, labels in loader:
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            samples += len(inputs)
    total = torch.tensor(samples)
    dist.all_reduce(total)
    if rank == 0:
        print(json.dumps({"steps": steps, "samples": int(total)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(train, (f"{folder}/meeting",), nprocs=RANKS, start_method=sys.argv[1])
