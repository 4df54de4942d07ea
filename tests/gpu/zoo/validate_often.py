"""A validation pass after every 5 steps takes longer than these."""

import torch
from stopwatch import Stopwatch
from torch import nn
from torch.utils.data import DataLoader, Dataset

watch = Stopwatch(torch.cuda.synchronize)


class Batches(Dataset):
    def __init__(self, count):
        self.batch = torch.randn(4096, 4096, dtype=torch.bfloat16).pin_memory()
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.batch, torch.full((4096,), index % 4)


train_loader = DataLoader(Batches(1000), batch_size=None)
valid_loader = DataLoader(Batches(20), batch_size=None)  # <- here
model = nn.Sequential(*(nn.Sequential(nn.Linear(4096, 4096), nn.ReLU()) for _ in range(12)), nn.Linear(4096, 4))
model = model.to("cuda", torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)

for inputs, labels in train_loader:
    loss = nn.functional.cross_entropy(model(inputs.to("cuda", non_blocking=True)), labels.to("cuda"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.step(len(inputs))
    if watch.seconds > 3:
        break
    if watch.steps % 5 == 0:
        torch.cuda.synchronize()
        with watch.part("validation"), torch.no_grad():
            model.eval()
            hits = sum((model(x.to("cuda")).argmax(1) == y.to("cuda")).sum() for x, y in valid_loader).item()
            model.train()
watch.tell()
