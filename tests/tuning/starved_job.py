"""A job that starves without workers: each sample sleeps. Prints its weights' hash; dropout needs the random stream."""

import hashlib
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
torch.manual_seed(0)


class Slow(Dataset):
    def __init__(self):
        self.samples = torch.randn(480, 64)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        time.sleep(0.004)
        return self.samples[index], index % 4


loader = DataLoader(Slow(), batch_size=8, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Dropout(), torch.nn.ReLU(), torch.nn.Linear(256, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(sys.argv[1])):
    for inputs, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.006)
weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
print("WEIGHTS", hashlib.sha256(weights).hexdigest())
