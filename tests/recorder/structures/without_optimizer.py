"""No optimizer and no backward(): torch.func or torch.autograd.grad gives the gradients, the script subtracts them."""

import json
import sys
import time

import torch
from torch.func import functional_call, grad
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    def __len__(self):
        return 1200

    def __getitem__(self, index):
        time.sleep(0.0005)
        return torch.full((64,), index % 7 / 7), index % 4


torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 4))
weights = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
by_func = grad(lambda given, inputs, labels: cross_entropy(functional_call(model, given, (inputs,)), labels))


def by_autograd(given, inputs, labels):
    loss = cross_entropy(functional_call(model, given, (inputs,)), labels)
    return dict(zip(given, torch.autograd.grad(loss, tuple(given.values())), strict=True))


slopes_of = by_func if sys.argv[1] == "func" else by_autograd
batches = DataLoader(Slow(), batch_size=16)
if sys.argv[1] == "without a loader":
    batches = [(torch.rand(16, 64), torch.arange(16) % 4) for _ in range(400)]
steps = samples = 0
for inputs, labels in batches:
    slopes = slopes_of(weights, inputs, labels)
    weights = {name: (value - 0.1 * slopes[name]).detach().requires_grad_() for name, value in weights.items()}
    steps += 1
    samples += len(inputs)
print(json.dumps({"steps": steps, "samples": samples if isinstance(batches, DataLoader) else None}))
