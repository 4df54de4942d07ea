"""Two workers wait 10 ms for each sample, as for a far storage, and use no CPU at it."""

import time

import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
watch = Stopwatch()


class FarSamples(Dataset):
    def __len__(self):
        return 480

    def __getitem__(self, index):
        time.sleep(0.01)  # <- here
        return torch.randn(64), index % 4


if __name__ == "__main__":
    loader = DataLoader(FarSamples(), batch_size=8, num_workers=2)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, labels in loader:
        watch.arrived()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.step(len(inputs))
    watch.tell()
