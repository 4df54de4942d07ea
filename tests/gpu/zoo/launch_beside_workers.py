"""Small kernels, launched beside workers whose threads keep every CPU busy."""

import os
import threading

import torch
from stopwatch import Stopwatch
from torch import nn
from torch.utils.data import DataLoader, Dataset

watch = Stopwatch(torch.cuda.synchronize)


class Spinning(Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        return torch.zeros(256)


def spin(_worker):
    def multiply():
        torch.set_num_threads(1)
        matrix = torch.randn(1024, 1024)
        while True:
            matrix = (matrix @ matrix).clamp(-1, 1)

    for _ in range(2 * len(os.sched_getaffinity(0))):
        threading.Thread(target=multiply, daemon=True).start()


if __name__ == "__main__":
    loader = DataLoader(Spinning(), batch_size=8, num_workers=2, pin_memory=True, worker_init_fn=spin)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.ReLU()) for _ in range(60)]
    model = nn.Sequential(*layers, nn.Linear(256, 4)).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for inputs in loader:
        loss = model(inputs.to("cuda", non_blocking=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.step(len(inputs))
        if watch.seconds > 12:
            break
    watch.tell()
