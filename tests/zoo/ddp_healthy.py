"""Two ranks with equal work and small gradients."""

import torch
import torch.distributed as dist
from stopwatch import Stopwatch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)
watch = Stopwatch()
dist.init_process_group("gloo")
samples = TensorDataset(torch.randn(16000, 3, 32, 32), torch.randint(10, (16000,)))
loader = DataLoader(samples, batch_size=64, sampler=DistributedSampler(samples))
network = torch.nn.Sequential(
    torch.nn.Conv2d(3, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 64, 3, 2), torch.nn.ReLU(),
    torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 10),
)  # fmt: skip
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

for number, (images, labels) in enumerate(loader):
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.step(len(images) * dist.get_world_size())
    if number == 120:
        break
if dist.get_rank() == 0:
    watch.tell()
dist.destroy_process_group()
