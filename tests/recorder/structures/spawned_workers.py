"""Workers that are spawned, not forked, and stay: each attaches itself like any Python process, and is no rank."""

import json
import time

import torch
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        time.sleep(0.005)
        return torch.randn(64), index % 4


def main():
    torch.set_num_threads(1)
    loader = DataLoader(
        Samples(), batch_size=8, num_workers=1, multiprocessing_context="spawn", persistent_workers=True
    )
    model = torch.nn.Linear(64, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    steps = samples = 0
    for _epoch in range(3):
        for inputs, labels in loader:
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            samples += len(inputs)
    print(json.dumps({"steps": steps, "samples": samples}))


if __name__ == "__main__":
    main()
