"""The loss is read after each step: the GPU then idles while the host launches the many small kernels that come first.

Without the reading the host would be ahead, since the large layers behind them take longer than all launches.
"""

import torch
from stopwatch import Stopwatch
from torch import nn

watch = Stopwatch(torch.cuda.synchronize)
small = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(100)))
large = nn.Sequential(nn.Linear(256, 8192), nn.ReLU(), nn.Linear(8192, 8192), nn.ReLU(), nn.Linear(8192, 8192))
model = nn.Sequential(small, large).to("cuda", torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
inputs = torch.randn(4096, 256, device="cuda", dtype=torch.bfloat16)
labels = torch.randint(8192, (4096,), device="cuda")

total = 0.0
while watch.seconds < 3:
    loss = nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total += loss.item()  # <- here
    watch.step(len(inputs))
watch.tell()
