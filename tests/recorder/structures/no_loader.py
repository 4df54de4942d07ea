"""As with nanoGPT: no DataLoader; the next batch is made between forward and backward; the loss is estimated apart."""

import json

import torch

torch.set_num_threads(1)
ACCUMULATE, ESTIMATE_EVERY = 2, 10
text = torch.randint(0, 60, (20_000,))


def get_batch():
    starts = torch.randint(len(text) - 32, (8,))
    return torch.stack([text[i : i + 32] for i in starts]), torch.stack([text[i + 1 : i + 33] for i in starts])


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.zeros(20)
    for k in range(20):
        inputs, targets = get_batch()
        losses[k] = loss_of(inputs, targets).item()
    model.train()
    return losses.mean()


def loss_of(inputs, targets):
    return torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


model = torch.nn.Sequential(torch.nn.Embedding(60, 64), torch.nn.Linear(64, 256), torch.nn.Linear(256, 60))
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cpu", enabled=False)
steps = 0
inputs, targets = get_batch()
while True:
    if steps % ESTIMATE_EVERY == 0:
        estimate_loss()
    for _ in range(ACCUMULATE):
        loss = loss_of(inputs, targets) / ACCUMULATE
        inputs, targets = get_batch()
        scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    steps += 1
    if steps > 100:
        break

print(json.dumps({"steps": steps, "samples": None}))
