"""A data-parallel training as the launchers in this folder start it: on GPUs, or on CPUs where there are none."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS = int(os.environ.get("STEPS", "200"))

gpus = torch.cuda.is_available()
dist.init_process_group("nccl" if gpus else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
samples = 32 * STEPS * dist.get_world_size()
data = TensorDataset(torch.randn(samples, 64), torch.randint(4, (samples,)))
loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))
model = DistributedDataParallel(torch.nn.Linear(64, 4).to(device))
optimizer = torch.optim.AdamW(model.parameters())

for inputs, labels in loader:
    loss = torch.nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
