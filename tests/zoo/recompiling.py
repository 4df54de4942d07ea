"""torch.compile with fixed shapes on batches of ever new sizes: each one compiles the model again."""

import torch
from stopwatch import Stopwatch
from torch import nn

torch.set_num_threads(1)
watch = Stopwatch()
layers = [layer for _ in range(12) for layer in (nn.Linear(128, 128), nn.ReLU())]
model = nn.Sequential(*layers, nn.Linear(128, 4))
compiled = torch.compile(model, backend="eager", dynamic=False)  # <- here
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

for step in range(900):
    inputs = torch.randn(16 + 2 * (step // 150), 128)
    loss = compiled(inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.step(len(inputs))
watch.tell()
