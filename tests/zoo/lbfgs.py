"""LBFGS: one step calls its closure, and so backward, several times."""

import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
watch = Stopwatch()
loader = DataLoader(TensorDataset(torch.randn(32 * 500, 64), torch.randn(32 * 500, 1)), batch_size=32)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

for inputs, targets in loader:

    def closure(inputs=inputs, targets=targets):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    optimizer.step(closure)
    watch.step(len(inputs))
    if watch.seconds > 2:
        break
watch.tell()
