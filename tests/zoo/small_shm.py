"""Batches of 2.4 MB, four of them ahead: that fills more than half of a container's small /dev/shm."""

import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
watch = Stopwatch()


class Images(Dataset):
    def __len__(self):
        return 12 * 400

    def __getitem__(self, index):
        return torch.zeros(3, 128, 128), index % 4


if __name__ == "__main__":
    loader = DataLoader(Images(), batch_size=12, num_workers=2)  # <- here
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 96, 5, 2), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for images, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.step(len(images))
        if watch.seconds > 3:
            break
    watch.tell()
