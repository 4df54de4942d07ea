"""Nothing wrong: large layers in bfloat16 keep the GPU at work, for twice as long as a host takes to launch them."""

import torch
from stopwatch import Stopwatch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

watch = Stopwatch(torch.cuda.synchronize)
loader = DataLoader(TensorDataset(torch.randint(4096, (64_000, 256))), batch_size=64, pin_memory=True)
layer = nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True)
model = nn.Sequential(nn.Embedding(4096, 1024), nn.TransformerEncoder(layer, 12), nn.Linear(1024, 4096)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

for (tokens,) in loader:
    tokens = tokens.to("cuda", non_blocking=True)
    with torch.autocast("cuda", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.step(len(tokens))
    if watch.steps % 20 == 0:
        torch.cuda.synchronize()  # or the host would queue seconds of work ahead
    if watch.seconds > 3:
        break
watch.tell()
