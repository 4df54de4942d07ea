"""The script sleeps 30 ms after each step while the GPU has nothing queued."""

import time

import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, TensorDataset

watch = Stopwatch(torch.cuda.synchronize)
samples = TensorDataset(torch.randn(120 * 64, 1024, dtype=torch.bfloat16), torch.randint(4, (120 * 64,)))
loader = DataLoader(samples, batch_size=64, pin_memory=True)
model = torch.nn.Sequential(torch.nn.Linear(1024, 8192), torch.nn.ReLU(), torch.nn.Linear(8192, 4))
model = model.to("cuda", torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

for inputs, labels in loader:
    inputs, labels = inputs.to("cuda", non_blocking=True), labels.to("cuda", non_blocking=True)
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.step(len(inputs))
    with watch.part("host_code"):
        time.sleep(0.03)  # <- here
watch.tell()
