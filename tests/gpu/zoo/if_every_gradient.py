"""Each gradient is looked at with float() and with an if, which nobody takes for a wait: the GPU runs dry each time."""

import torch
from stopwatch import Stopwatch
from torch import nn

watch = Stopwatch(torch.cuda.synchronize)
model = nn.Sequential(*(nn.Sequential(nn.Linear(4096, 4096), nn.ReLU()) for _ in range(24)))
model = model.to("cuda", torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
inputs = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
labels = torch.randint(4096, (4096,), device="cuda")

exploded = 0
while watch.seconds < 3:
    loss = nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        if float(parameter.grad.norm()) > 1e6 or parameter.grad.isnan().any():  # <- here
            exploded += 1
    optimizer.step()
    watch.step(len(inputs))
watch.tell()
