"""The model itself sleeps in forward()."""

import time

import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
watch = Stopwatch()


class Sleepy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(256, 1024)
        self.outer = torch.nn.Linear(1024, 4)

    def forward(self, inputs):
        hidden = torch.relu(self.inner(inputs))
        with watch.part("host_code"):
            time.sleep(0.02)  # <- here
        return self.outer(hidden)


loader = DataLoader(TensorDataset(torch.randn(200 * 8, 256), torch.randint(4, (200 * 8,))), batch_size=8)
model = Sleepy()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for inputs, labels in loader:
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.step(len(inputs))
watch.tell()
