"""gc.collect() after each step, beside a data set of many small Python objects: each call walks through all of them."""

import gc

import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
watch = Stopwatch()

annotations = [{"boxes": [[number, number + 1]], "labels": [number % 4]} for number in range(10_000)]
loader = DataLoader(TensorDataset(torch.randn(40_000, 256), torch.randint(4, (40_000,))), batch_size=32)
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for inputs, labels in loader:
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.step(len(inputs))
    with watch.part("host_code"):
        gc.collect()  # <- here
    if watch.seconds > 2:
        break
watch.tell()
