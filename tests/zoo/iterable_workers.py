"""A stream of samples, divided among two workers which wait for each of them; both end with a short batch."""

import time

import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

torch.set_num_threads(1)
watch = Stopwatch()


class Stream(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        for number in range(worker.id, 470, worker.num_workers):
            time.sleep(0.01)  # <- here
            yield torch.randn(64), number % 4


if __name__ == "__main__":
    loader = DataLoader(Stream(), batch_size=8, num_workers=2)
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
