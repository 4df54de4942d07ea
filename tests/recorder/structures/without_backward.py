"""Meta-learning: gradients come from torch.autograd.grad, and a first step without any pleases a scheduler's check."""

import json

import torch
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
optimizer.step()
loader = DataLoader(TensorDataset(torch.randn(3210, 64), torch.randint(8, (3210,))), batch_size=32)

steps = samples = 0
for _ in range(3):
    for inputs, labels in loader:
        now = dict(model.named_parameters())
        inner = cross_entropy(functional_call(model, now, (inputs,)), labels)
        slopes = torch.autograd.grad(inner, tuple(now.values()), create_graph=True)
        ahead = {name: weights - 0.01 * slope for (name, weights), slope in zip(now.items(), slopes, strict=True)}
        outer = cross_entropy(functional_call(model, ahead, (inputs,)), labels)
        for weights, slope in zip(now.values(), torch.autograd.grad(outer, tuple(now.values())), strict=True):
            weights.grad = slope
        optimizer.step()
        steps += 1
        samples += len(inputs)
print(json.dumps({"steps": steps, "samples": samples}))
