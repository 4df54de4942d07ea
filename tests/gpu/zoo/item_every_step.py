"""The norm of each gradient is read, one by one: the GPU runs dry at every reading."""

import torch
from stopwatch import Stopwatch
from torch import nn

watch = Stopwatch(torch.cuda.synchronize)
model = nn.Sequential(*(nn.Sequential(nn.Linear(4096, 4096), nn.ReLU()) for _ in range(24)))
model = model.to("cuda", torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
inputs = torch.randn(1024, 4096, device="cuda", dtype=torch.bfloat16)
labels = torch.randint(4096, (1024,), device="cuda")

norms = {}
while watch.seconds < 3:
    loss = nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    for name, parameter in model.named_parameters():
        norms[name] = parameter.grad.norm().item()  # <- here
    optimizer.step()
    watch.step(len(inputs))
watch.tell()
