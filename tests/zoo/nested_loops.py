"""As in policy optimisation: an outer loader brings rollouts, an inner one goes through each twice in small batches."""

import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
watch = Stopwatch()
rollouts = DataLoader(TensorDataset(torch.randn(256 * 200, 128), torch.randn(256 * 200, 1)), batch_size=256)
model = torch.nn.Sequential(torch.nn.Linear(128, 4096), torch.nn.Tanh(), torch.nn.Linear(4096, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for states, returns in rollouts:
    inner_loader = DataLoader(TensorDataset(states, returns), batch_size=32, shuffle=True)
    for _ in range(2):
        for inputs, targets in inner_loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watch.step(len(inputs))
    if watch.seconds > 2:
        break
watch.tell()
