"""Each worker keeps every sample that it has made: its memory grows until there is none left."""

import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
watch = Stopwatch()


class Remembering(Dataset):
    def __init__(self):
        self.seen = {}

    def __len__(self):
        return 100_000_000

    def __getitem__(self, index):
        self.seen[index] = torch.full((65_536,), float(index % 7))
        return self.seen[index][:256].clone(), index % 4


if __name__ == "__main__":
    loader = DataLoader(Remembering(), batch_size=4, num_workers=1)  # <- here
    model = torch.nn.Sequential(torch.nn.Linear(256, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for inputs, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.step(len(inputs))
        if watch.seconds > 10:
            break
    watch.tell()
