"""As with accelerate: the loader is wrapped and draws one batch ahead; evaluation draws with gradients on."""

import json

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
ACCUMULATE = 3


class Prepared:
    """Yields each batch only when the next one has been drawn, to know which is the last."""

    def __init__(self, loader):
        self.loader = DataLoader(loader.dataset, batch_sampler=loader.batch_sampler)  # made anew, as accelerate does
        self.at_end = False

    def __iter__(self):
        batches = iter(self.loader)
        current = next(batches)
        while True:
            try:
                following = next(batches)
            except StopIteration:
                self.at_end = True
                yield current
                return
            yield current
            current = following


def data(samples):
    return TensorDataset(torch.randn(samples, 64), torch.randint(0, 4, (samples,)))


train = Prepared(DataLoader(data(110), batch_size=8, shuffle=True))
held_out = Prepared(DataLoader(data(40), batch_size=8))
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
optimizer = torch.optim.AdamW(model.parameters())
steps = samples = 0

for epoch in range(3):
    model.train()
    train.at_end = False
    for number, (inputs, labels) in enumerate(train):
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        samples += len(inputs)
        if (number + 1) % ACCUMULATE == 0 or train.at_end:
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
        if epoch == 2 and steps == 13:
            break  # in the middle of the epoch, with one batch drawn that is never used
    model.eval()
    for inputs, _ in held_out:
        with torch.no_grad():
            model(inputs)

print(json.dumps({"steps": steps, "samples": samples}))
