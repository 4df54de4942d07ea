"""A prefetching thread of the script's own that cannot keep up: training waits for it at its queue."""

import queue
import threading
import time

import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
watch = Stopwatch()


class WaitingSamples(Dataset):
    def __len__(self):
        return 8 * 150

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.zeros(64), index % 4


def prefetch(loader, ready):
    for batch in loader:
        ready.put(batch)
    ready.put(None)


loader = DataLoader(WaitingSamples(), batch_size=8)  # <- here
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ready = queue.Queue(maxsize=4)
threading.Thread(target=prefetch, args=(loader, ready), daemon=True).start()

while (batch := ready.get()) is not None:  # <- here
    inputs, labels = batch
    watch.arrived()
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.step(len(inputs))
watch.tell()
