"""Samples from an averaged copy every 10 steps, gradients off: no loader, and the trained model is never switched."""

import copy

import torch
from stopwatch import Stopwatch
from torch import nn
from torch.utils.data import DataLoader, Dataset

watch = Stopwatch(torch.cuda.synchronize)


class Batches(Dataset):
    def __init__(self):
        self.batch = torch.randn(4096, 4096, dtype=torch.bfloat16).pin_memory()

    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        return self.batch


loader = DataLoader(Batches(), batch_size=None)
model = nn.Sequential(*(nn.Sequential(nn.Linear(4096, 4096), nn.SiLU()) for _ in range(8)), nn.Linear(4096, 4096))
model = model.to("cuda", torch.bfloat16)
average = copy.deepcopy(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)


@torch.no_grad()
def follow():
    for kept, now in zip(average.parameters(), model.parameters(), strict=True):
        kept.lerp_(now, 0.01)


@torch.no_grad()
def sample():
    noise = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(60):
        noise = noise - 0.01 * average(noise)
    return noise.mean().item()


for inputs in loader:
    inputs = inputs.to("cuda", non_blocking=True)
    with torch.no_grad():
        taught = average(inputs)
    loss = nn.functional.mse_loss(model(inputs + torch.randn_like(inputs)), taught)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    follow()
    watch.step(len(inputs))
    if watch.seconds > 3:
        break
    if watch.steps % 10 == 0:
        torch.cuda.synchronize()
        with watch.part("validation"):
            sample()
watch.tell()
