"""A prefetching thread of the script's own that runs Python: it takes the GIL from the training, and no wait shows."""

import queue
import random
import threading

import torch
from stopwatch import Stopwatch

torch.set_num_threads(1)
watch = Stopwatch()
STEPS, BATCH, LENGTH = 250, 32, 200


def tokenized(draw):
    words = [str(draw.randrange(1000)) for _ in range(2 * LENGTH)]  # <- here
    return [len(word) + sum(map(ord, word)) % 200 for word in words][:LENGTH]  # <- here


def prefetch(ready):
    draw = random.Random(0)
    for _ in range(STEPS):
        ready.put(torch.tensor([tokenized(draw) for _ in range(BATCH)]))  # <- here


layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(40)]
model = torch.nn.Sequential(torch.nn.Embedding(256, 4), torch.nn.Flatten(), torch.nn.Linear(4 * LENGTH, 64), *layers)
optimizer = torch.optim.AdamW(model.parameters())
ready = queue.Queue(maxsize=4)
threading.Thread(target=prefetch, args=(ready,), daemon=True).start()
for _ in range(STEPS):
    tokens = ready.get()
    loss = model(tokens).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.step(len(tokens))
watch.tell()
