"""In the middle of its training the job is killed, as by a scheduler or the kernel's OOM killer."""

import os
import signal
import time

import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
watch = Stopwatch()
loader = DataLoader(TensorDataset(torch.randn(8000, 256), torch.randint(4, (8000,))), batch_size=8)
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for inputs, labels in loader:
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.step(len(inputs))
    if watch.seconds > 3.5:
        watch.tell()
        os.kill(os.getpid(), signal.SIGKILL)
    with watch.part("host_code"):
        time.sleep(0.01)  # <- here
