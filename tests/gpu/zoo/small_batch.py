"""One sequence at a time: each attention kernel runs long enough, but on a third of the GPU."""

import torch
from stopwatch import Stopwatch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import DataLoader, Dataset

watch = Stopwatch(torch.cuda.synchronize)
LENGTH, WIDTH, NARROW = 6144, 128, 8  # narrow on the host, so that loading and copying cost nothing


class Sequences(Dataset):
    def __init__(self):
        self.sequence = torch.randn(1, LENGTH, NARROW, dtype=torch.bfloat16)

    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        return self.sequence


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.scales = nn.Parameter(torch.ones(3, WIDTH))

    def forward(self, hidden):
        query, key, value = self.scales
        return hidden + scaled_dot_product_attention(hidden * query, hidden * key, hidden * value)


loader = DataLoader(Sequences(), batch_size=1, pin_memory=True)  # <- here
model = nn.Sequential(*(Attention() for _ in range(8))).to("cuda", torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)

with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
    for sequences in loader:
        hidden = sequences.to("cuda", non_blocking=True).repeat(1, 1, 1, WIDTH // NARROW)
        loss = model(hidden).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.step(len(sequences))
        if watch.steps % 20 == 0:
            torch.cuda.synchronize()  # or the host would queue seconds of work ahead
        if watch.seconds > 3:
            break
watch.tell()
