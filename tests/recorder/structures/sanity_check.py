"""As with Lightning: validation before any training, backward in the optimizer's closure, modes put back by hand."""

import json

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
VALIDATE_EVERY = 7


def validate(batches=None):
    modes = {module: module.training for module in model.modules()}
    model.eval()
    with torch.inference_mode():
        for number, (inputs,) in enumerate(validation_loader):
            if number == batches:
                break
            model(inputs)
    for module, mode in modes.items():
        module.training = mode


def fetched(loader):
    batches = iter(loader)
    ready = next(batches)
    for following in batches:
        yield ready, False
        ready = following
    yield ready, True


validation_loader = DataLoader(TensorDataset(torch.randn(40, 64)), batch_size=8)
train_loader = DataLoader(TensorDataset(torch.randn(120, 64)), batch_size=8, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
optimizer = torch.optim.Adam(model.parameters())
steps = samples = 0
validate(batches=2)
for _epoch in range(3):
    for (inputs,), last in fetched(train_loader):

        def closure(inputs=inputs):
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        steps += 1
        samples += len(inputs)
        if steps % VALIDATE_EVERY == 0 or last:
            validate()

print(json.dumps({"steps": steps, "samples": samples}))
