"""Rank 1 sleeps in each step, and rank 0 waits for it in the exchange of gradients."""

import time

import torch
import torch.distributed as dist
from stopwatch import Stopwatch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)
watch = Stopwatch()
dist.init_process_group("gloo")
samples = TensorDataset(torch.randn(8 * 2 * 120, 256), torch.randint(4, (8 * 2 * 120,)))
loader = DataLoader(samples, batch_size=8, sampler=DistributedSampler(samples))
network = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 4))
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

for inputs, labels in loader:
    if dist.get_rank() == 1:
        time.sleep(0.015)  # <- here
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.step(len(inputs) * dist.get_world_size())
if dist.get_rank() == 0:
    watch.tell()
dist.destroy_process_group()
