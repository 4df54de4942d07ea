"""Something binds the process to one CPU, as some libraries do when they are imported: its workers share that one."""

import os

import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
watch = Stopwatch()


class RunLengthEncoded(Dataset):
    def __init__(self):
        self.runs = [(value % 7, value % 13 + 1) for value in range(400)]

    def __len__(self):
        return 40_000

    def __getitem__(self, index):
        pixels = []
        for value, length in self.runs:
            pixels += [float((value * step + index) % 11) for step in range(length)]
        return torch.tensor(pixels[:256]), index % 4


if __name__ == "__main__":
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    loader = DataLoader(RunLengthEncoded(), batch_size=16, num_workers=2)  # <- here
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, labels in loader:
        watch.arrived()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.step(len(inputs))
        if watch.seconds > 3:
            break
    watch.tell()
