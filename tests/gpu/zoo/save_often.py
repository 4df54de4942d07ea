"""A model of 400 MB is saved after every 20 steps."""

import tempfile
from pathlib import Path

import torch
from stopwatch import Stopwatch
from torch import nn

watch = Stopwatch(torch.cuda.synchronize)
model = nn.Sequential(*(nn.Sequential(nn.Linear(4096, 4096), nn.ReLU()) for _ in range(12)))
model = model.to("cuda", torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
inputs = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
labels = torch.randint(4096, (4096,), device="cuda")

with tempfile.TemporaryDirectory() as folder:
    # The last save is followed by steps, whatever the disk: a rate counts from step to step.
    while watch.seconds < 3 or watch.steps % 20 < 5:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.step(len(inputs))
        if watch.steps % 20 == 0 and watch.seconds < 2.5:
            torch.cuda.synchronize()
            with watch.part("checkpoint"):
                torch.save(model.state_dict(), Path(folder) / "latest.pt")  # <- here
    watch.tell()
