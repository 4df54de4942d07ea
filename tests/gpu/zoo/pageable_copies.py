"""Batches of 200 MB lie in ordinary memory and are copied while everything waits."""

import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, Dataset

watch = Stopwatch(torch.cuda.synchronize)


class ReadyBatches(Dataset):
    def __init__(self):
        self.batches = [torch.rand(64, 3, 512, 512) for _ in range(4)]

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return self.batches[index % 4], torch.full((64,), index % 4)


loader = DataLoader(ReadyBatches(), batch_size=None)
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 64, 7, 4), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
)
model = model.to("cuda", torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)

for images, labels in loader:
    images = images.to("cuda")  # <- here
    loss = torch.nn.functional.cross_entropy(model(images.bfloat16()), labels.to("cuda"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.step(len(images))
    if watch.seconds > 3:
        break
watch.tell()
