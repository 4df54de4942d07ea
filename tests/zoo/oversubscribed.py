"""Eight computing workers and two training threads fight for two CPUs."""

import numpy as np
import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(2)
watch = Stopwatch()


class Simulated(Dataset):
    def __len__(self):
        return 8000

    def __getitem__(self, index):
        noise = np.random.default_rng(index).standard_normal(100_000)
        return torch.from_numpy(np.sort(noise)[::400].astype(np.float32)), index % 4


if __name__ == "__main__":
    loader = DataLoader(Simulated(), batch_size=4, num_workers=8)  # <- here
    model = torch.nn.Sequential(torch.nn.Linear(250, 128), torch.nn.ReLU(), torch.nn.Linear(128, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for inputs, labels in loader:
        watch.arrived()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.step(len(inputs))
        if watch.seconds > 2.5:
            break
    watch.tell()
