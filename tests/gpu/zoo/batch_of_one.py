"""Single samples through 100 small layers: the host cannot launch kernels as fast as the GPU runs them."""

import torch
from stopwatch import Stopwatch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

watch = Stopwatch(torch.cuda.synchronize)
samples = TensorDataset(torch.randn(10_000, 256, dtype=torch.bfloat16), torch.randint(4, (10_000,)))
loader = DataLoader(samples, batch_size=1, pin_memory=True)
layers = [nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.ReLU()) for _ in range(100)]
model = nn.Sequential(*layers, nn.Linear(256, 4)).to("cuda", torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

for inputs, labels in loader:
    inputs, labels = inputs.to("cuda", non_blocking=True), labels.to("cuda", non_blocking=True)
    loss = nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.step(len(inputs))
    if watch.seconds > 3:
        break
watch.tell()
