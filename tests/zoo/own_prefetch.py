"""A prefetching thread of the script's own hides the waiting of the data set behind the computing."""

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
        return 16 * 180

    def __getitem__(self, index):
        time.sleep(0.0001)
        return torch.zeros(512), index % 4


def prefetch(loader, ready):
    for batch in loader:
        ready.put(batch)
    ready.put(None)


loader = DataLoader(WaitingSamples(), batch_size=16)
model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512), torch.nn.ReLU())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ready = queue.Queue(maxsize=4)
threading.Thread(target=prefetch, args=(loader, ready), daemon=True).start()

while (batch := ready.get()) is not None:
    inputs, labels = batch
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.step(len(inputs))
watch.tell()
