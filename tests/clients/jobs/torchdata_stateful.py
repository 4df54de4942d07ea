"""torchdata's StatefulDataLoader, which torchtune, torchtitan and accelerate use: training and a validation."""

import torch
from slow_data import SlowRows, small_model, tell
from torchdata.stateful_dataloader import StatefulDataLoader

model = small_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
train_loader = StatefulDataLoader(SlowRows(320), batch_size=8, shuffle=True)
valid_loader = StatefulDataLoader(SlowRows(32), batch_size=8)
steps = samples = 0
for _ in range(2):
    model.train()
    for rows, labels in train_loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(rows), labels).backward()
        optimizer.step()
        steps += 1
        samples += len(rows)
    model.eval()
    with torch.no_grad():
        for rows, _labels in valid_loader:
            model(rows)
assert train_loader.state_dict()["_num_yielded"] == 40
tell(steps, samples)
