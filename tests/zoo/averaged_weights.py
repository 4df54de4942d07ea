"""A moving average of the weights after each step: torch works, but not at forward, backward or optimizer."""

import copy

import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
watch = Stopwatch()
loader = DataLoader(TensorDataset(torch.randn(20000, 64), torch.randint(4, (20000,))), batch_size=16)
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 4))
average = copy.deepcopy(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


@torch.no_grad()
def follow():
    for _ in range(20):
        for kept, now in zip(average.parameters(), model.parameters(), strict=True):  # <- here
            kept.mul_(0.999).add_(now, alpha=0.001)  # <- here


for inputs, labels in loader:
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    watch.step(len(inputs))
    with watch.part("host_code"):
        follow()
    if watch.seconds > 2:
        break
watch.tell()
