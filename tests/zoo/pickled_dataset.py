"""A data set of many small Python objects, pickled to a worker that a fork server starts anew for each pass."""

import multiprocessing

import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
watch = Stopwatch()


class Annotated(Dataset):
    def __init__(self, objects):
        self.annotations = [(f"image-{number:08d}.jpg", number % 4, [number, number + 1]) for number in range(objects)]

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.randn(64), self.annotations[index][1]


if __name__ == "__main__":
    data_set = Annotated(800_000)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    loader = DataLoader(data_set, batch_size=16, num_workers=1, multiprocessing_context=context)  # <- here
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for inputs, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watch.step(len(inputs))
    watch.tell()
