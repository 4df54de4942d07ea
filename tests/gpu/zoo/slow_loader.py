"""The GPU waits for two workers that wait 4 ms for each sample."""

import time

import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, Dataset

watch = Stopwatch(torch.cuda.synchronize)


class FarSamples(Dataset):
    def __len__(self):
        return 16 * 80

    def __getitem__(self, index):
        time.sleep(0.004)  # <- here
        return torch.randn(1024, dtype=torch.bfloat16), index % 4


if __name__ == "__main__":
    loader = DataLoader(FarSamples(), batch_size=16, num_workers=2, pin_memory=True)
    model = torch.nn.Sequential(torch.nn.Linear(1024, 8192), torch.nn.ReLU(), torch.nn.Linear(8192, 4))
    model = model.to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for inputs, labels in loader:
        inputs, labels = inputs.to("cuda", non_blocking=True), labels.to("cuda", non_blocking=True)
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.step(len(inputs))
    watch.tell()
