"""A metric is computed token by token in a Python loop after each step."""

import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
watch = Stopwatch()


def edit_rate(guesses, truths):
    errors = 0
    for guess, truth in zip(guesses, truths, strict=True):  # <- here
        if guess != truth:  # <- here
            errors += abs(guess - truth) % 3  # <- here
    return errors / len(truths)


loader = DataLoader(TensorDataset(torch.randn(20000, 64)), batch_size=16)
targets = torch.randint(8, (16 * 2000,))
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for (inputs,) in loader:
    loss = torch.nn.functional.cross_entropy(model(inputs), targets[: len(inputs)])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.step(len(inputs))
    with watch.part("host_code"):
        edit_rate(targets.tolist(), targets.flip(0).tolist())
    if watch.seconds > 2:
        break
watch.tell()
