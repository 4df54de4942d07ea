"""All weights are logged as JSON after each step."""

import json
import tempfile

import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
watch = Stopwatch()
loader = DataLoader(TensorDataset(torch.randn(4000, 128), torch.randint(4, (4000,))), batch_size=8)
model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.ReLU(), torch.nn.Linear(128, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

with tempfile.TemporaryFile("w") as log:
    for inputs, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.step(len(inputs))
        with watch.part("host_code"):
            log.write(json.dumps({name: weights.tolist() for name, weights in model.state_dict().items()}))  # <- here
        if watch.seconds > 2:
            break
watch.tell()
