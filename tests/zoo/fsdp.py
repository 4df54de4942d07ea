"""Two ranks that share the parameters out: each layer is gathered before it computes."""

import torch
import torch.distributed as dist
from stopwatch import Stopwatch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)
watch = Stopwatch()
dist.init_process_group("gloo")
samples = TensorDataset(torch.randn(200, 1024), torch.randint(1024, (200,)))
loader = DataLoader(samples, batch_size=4, sampler=DistributedSampler(samples))
model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1024))
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

for inputs, labels in loader:
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.step(len(inputs) * dist.get_world_size())
if dist.get_rank() == 0:
    watch.tell()
dist.destroy_process_group()
