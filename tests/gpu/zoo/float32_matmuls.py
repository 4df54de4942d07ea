"""Large layers in plain float32: the tensor cores have nothing to do."""

import torch
from stopwatch import Stopwatch
from torch import nn

watch = Stopwatch(torch.cuda.synchronize)
model = nn.Sequential(*(nn.Sequential(nn.Linear(4096, 4096), nn.ReLU()) for _ in range(6))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
inputs = torch.randn(4096, 4096, device="cuda")
labels = torch.randint(4096, (4096,), device="cuda")

while watch.seconds < 3:
    loss = nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.step(len(inputs))
    if watch.steps % 20 == 0:
        torch.cuda.synchronize()  # or the host would queue minutes of work ahead
watch.tell()
