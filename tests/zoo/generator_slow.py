"""No DataLoader: a generator makes each batch on the training thread, in NumPy, and takes long for it."""

import numpy as np
import torch
from stopwatch import Stopwatch

torch.set_num_threads(1)
watch = Stopwatch()
draw = np.random.default_rng(0)


def batches():
    while True:
        noise = draw.standard_normal((32, 20_000))  # <- here
        yield torch.from_numpy(noise[:, :128].astype(np.float32)), torch.randint(4, (32,))


model = torch.nn.Sequential(torch.nn.Linear(128, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for inputs, labels in batches():
    watch.arrived()
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.step(len(inputs))
    if watch.seconds > 2:
        break
watch.tell()
