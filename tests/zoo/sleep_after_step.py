"""The script sleeps 10 ms after each step."""

import time

import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
watch = Stopwatch()
loader = DataLoader(TensorDataset(torch.randn(160 * 8, 256), torch.randint(4, (160 * 8,))), batch_size=8)
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for inputs, labels in loader:
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.step(len(inputs))
    with watch.part("host_code"):
        time.sleep(0.01)  # <- here
watch.tell()
