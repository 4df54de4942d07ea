"""Hugging Face accelerate: a loop of the script's own around prepared objects."""

import torch
from accelerate import Accelerator
from slow_data import EPOCHS, SlowRows, numbers, small_model, tell
from torch.utils.data import DataLoader

SAMPLES = 640
accelerator = Accelerator(cpu=True)
model = small_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(SlowRows(SAMPLES), batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
order, steps = [], 0
for _ in range(EPOCHS):
    for rows, labels in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.cross_entropy(model(rows), labels))
        optimizer.step()
        steps += 1
        order += numbers(rows, SAMPLES)
tell(steps, len(order), order)
