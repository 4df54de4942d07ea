"""Batches come through a queue from a thread of the script's own, and another thread evaluates beside the training."""

import copy
import json
import queue
import threading
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ready = queue.Queue(maxsize=2)
training = True


def make_batches():
    for _ in range(100):
        time.sleep(0.02)
        ready.put(torch.randn(16, 64))
    ready.put(None)


@torch.no_grad()
def evaluate(kept):
    while training:
        for (inputs,) in DataLoader(TensorDataset(torch.randn(64, 64)), batch_size=4):
            kept(inputs)
            time.sleep(0.01)


producer = threading.Thread(target=make_batches)
producer.start()
evaluation = threading.Thread(target=evaluate, args=(copy.deepcopy(model).eval(),))
steps, waited_s = 0, 0.0
while True:
    began_s = time.perf_counter()
    batch = ready.get()
    waited_s += time.perf_counter() - began_s
    if batch is None:
        break
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
    steps += 1
    if steps == 1:
        waited_s = 0.0  # before the first step everything is start-up
        evaluation.start()
training = False
evaluation.join()
Path("seconds.json").write_text(json.dumps({"waited": waited_s}))
print(json.dumps({"steps": steps, "samples": None}))
