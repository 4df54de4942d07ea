"""Every epoch breaks off after 6 batches and begins anew."""

import time

import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
watch = Stopwatch()


class SlowSamples(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.randn(64), index % 4


loader = DataLoader(SlowSamples(), batch_size=8, shuffle=True)  # <- here
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for _ in range(22):
    for number, (inputs, labels) in enumerate(loader):
        if number == 6:
            break  # this batch is drawn and not trained on
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.step(len(inputs))
watch.tell()
