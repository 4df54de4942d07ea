"""A collate function returns large NumPy arrays: every batch is pickled, piped and rebuilt instead of shared."""

import numpy as np
import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
watch = Stopwatch()


class Volumes(Dataset):
    def __init__(self):
        self.volume = np.random.default_rng(0).random((1, 160, 2048), dtype=np.float32)

    def __len__(self):
        return 8000

    def __getitem__(self, index):
        return self.volume, index % 4


def stack(samples):
    volumes, labels = zip(*samples, strict=True)
    return {"volumes": np.concatenate(volumes), "labels": np.array(labels)}


if __name__ == "__main__":
    loader = DataLoader(Volumes(), batch_size=16, num_workers=2, collate_fn=stack)  # <- here
    model = torch.nn.Sequential(torch.nn.Linear(2048, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in loader:
        watch.arrived()
        inputs = torch.from_numpy(batch["volumes"][:, 0])
        loss = torch.nn.functional.cross_entropy(model(inputs), torch.from_numpy(batch["labels"]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.step(len(inputs))
        if watch.seconds > 2:
            break
    watch.tell()
