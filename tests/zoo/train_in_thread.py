"""Training runs in a thread of its own, as under a user interface, and pauses after each step."""

import threading
import time

import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, TensorDataset

watch = Stopwatch()


def train():
    torch.set_num_threads(1)
    loader = DataLoader(TensorDataset(torch.randn(160 * 8, 256), torch.randint(4, (160 * 8,))), batch_size=8)
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for inputs, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.step(len(inputs))
        with watch.part("host_code"):
            time.sleep(0.01)  # <- here


thread = threading.Thread(target=train)
thread.start()
while thread.is_alive():
    thread.join(0.05)
watch.tell()
