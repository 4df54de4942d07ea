"""Mixed precision with a gradient scaler that skips every tenth step because its gradients are infinite."""

import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
watch = Stopwatch()
loader = DataLoader(TensorDataset(torch.randn(16000, 512), torch.randint(4, (16000,))), batch_size=16)
model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")

skipped = 0
for number, (inputs, labels) in enumerate(loader, start=1):
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    if number % 10 == 0:
        loss = loss * float("inf")
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    skipped += scaler.get_scale() < scale
    watch.step(len(inputs))
    if watch.seconds > 2:
        break
watch.tell(skipped=skipped)
