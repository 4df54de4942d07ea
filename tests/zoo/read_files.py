"""Samples are real files, opened, read and parsed one by one by the training thread itself."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
watch = Stopwatch()


class ArrayFiles(Dataset):
    def __init__(self, folder, count):
        self.paths = [Path(folder) / f"{number:04}.csv" for number in range(count)]
        for number, path in enumerate(self.paths):
            np.savetxt(path, np.full((64, 64), number / count), fmt="%.4f")

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return torch.from_numpy(np.loadtxt(self.paths[index], dtype=np.float32)).flatten(), index % 4


with tempfile.TemporaryDirectory() as folder:
    loader = DataLoader(ArrayFiles(folder, 200), batch_size=8, shuffle=True)  # <- here
    model = torch.nn.Sequential(torch.nn.Linear(4096, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while watch.seconds < 2:
        for inputs, labels in loader:
            watch.arrived()
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watch.step(len(inputs))
    watch.tell()
