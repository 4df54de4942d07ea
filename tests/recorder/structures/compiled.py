"""A model compiled as one whole graph that moves tensors inside, with gradient checkpointing: nothing may break it."""

import json

import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 128), torch.nn.Linear(128, 4)

    def forward(self, inputs):
        hidden = checkpoint(self.first, inputs.to(torch.float32), use_reentrant=False)
        positions = torch.arange(hidden.shape[1]).to(hidden.device)
        return self.second(torch.relu(hidden) + positions.to(hidden.dtype) * 1e-3)


model = Model()
compiled = torch.compile(model, fullgraph=True, backend="eager")
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(TensorDataset(torch.randn(80, 64).double(), torch.randint(0, 4, (80,))), batch_size=8)
steps = samples = 0
for _epoch in range(3):
    for inputs, labels in loader:
        torch.nn.functional.cross_entropy(compiled(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        samples += len(inputs)

print(json.dumps({"steps": steps, "samples": samples}))
