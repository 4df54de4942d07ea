"""As with Hugging Face's Trainer: looks for torch before importing it, draws all batches of a step before the model is

switched back from evaluation, skips the batches of an earlier run, and stops after so many steps.
"""

import importlib.util
import itertools
import json
import tempfile

if importlib.util.find_spec("torch") is None:
    raise SystemExit("torch is missing")

import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

torch.set_num_threads(1)
ACCUMULATE, SKIP, STOP_AFTER, EVALUATE_EVERY = 2, 3, 14, 4


class Skipping(BatchSampler):
    """All batches but the first few."""

    def __iter__(self):
        return itertools.islice(super().__iter__(), SKIP, None)


def one_ahead(loader):
    batches = iter(loader)
    current = next(batches)
    for following in batches:
        yield current
        current = following
    yield current


def evaluate():
    model.eval()
    with torch.no_grad():
        for (inputs,) in DataLoader(held_out, batch_size=8):
            model(inputs)


def train(loader):
    global steps, samples
    batches = one_ahead(loader)
    while drawn := list(itertools.islice(batches, ACCUMULATE)):
        for (inputs,) in drawn:
            model.train()
            model(inputs).square().mean().backward()
            samples += len(inputs)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps % EVALUATE_EVERY == 0:
            evaluate()
        if steps == STOP_AFTER:
            return


whole, held_out = TensorDataset(torch.randn(100, 64)), TensorDataset(torch.randn(24, 64))
resumed = DataLoader(whole, batch_sampler=Skipping(SequentialSampler(whole), 8, drop_last=False))
loader = DataLoader(whole, batch_size=8)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
optimizer = torch.optim.AdamW(model.parameters())
steps = samples = 0
train(resumed)
evaluate()
while steps < STOP_AFTER:
    train(loader)
with tempfile.TemporaryDirectory() as folder:
    torch.save(model.state_dict(), f"{folder}/model.pt")

print(json.dumps({"steps": steps, "samples": samples}))
