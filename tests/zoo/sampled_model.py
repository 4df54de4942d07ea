"""Samples from an averaged copy every 10 steps, gradients off: no loader, and the trained model is never switched."""

import copy

import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
watch = Stopwatch()
loader = DataLoader(TensorDataset(torch.randn(40000, 64)), batch_size=64)
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.SiLU(), torch.nn.Linear(512, 64))
average = copy.deepcopy(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


@torch.no_grad()
def follow():
    for kept, now in zip(average.parameters(), model.parameters(), strict=True):
        kept.lerp_(now, 0.01)


@torch.no_grad()
def sample():
    noise = torch.randn(64, 64)
    for _ in range(250):
        noise = noise - 0.01 * average(noise)
    return noise


while watch.seconds < 3:
    for number, (inputs,) in enumerate(loader, start=1):
        with torch.no_grad():
            taught = average(inputs)
        loss = torch.nn.functional.mse_loss(model(inputs + torch.randn_like(inputs)), taught)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        follow()
        watch.step(len(inputs))
        if watch.seconds > 3:
            break
        if number % 10 == 0:
            with watch.part("validation"):
                sample()
watch.tell()
