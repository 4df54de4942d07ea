"""Labelled and unlabelled samples from two loaders side by side; the unlabelled ones come slowly."""

import time

import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, Dataset, TensorDataset

torch.set_num_threads(1)
watch = Stopwatch()


class Unlabelled(Dataset):
    def __len__(self):
        return 8 * 150

    def __getitem__(self, index):
        time.sleep(0.0015)
        return torch.randn(64)


labelled_loader = DataLoader(TensorDataset(torch.randn(2400, 64), torch.randint(4, (2400,))), batch_size=16)
unlabelled_loader = DataLoader(Unlabelled(), batch_size=8)  # <- here
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for (inputs, labels), others in zip(labelled_loader, unlabelled_loader, strict=True):
    watch.arrived()
    guesses = model(others).argmax(1)
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    loss = loss + torch.nn.functional.cross_entropy(model(others + 0.1), guesses)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.step(len(inputs))
watch.tell()
