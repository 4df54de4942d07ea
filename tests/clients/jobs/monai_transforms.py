"""MONAI: a Dataset with transforms behind MONAI's DataLoader."""

import torch
from monai.data import DataLoader, Dataset
from monai.transforms import Compose, Lambda
from slow_data import EPOCHS, augment, numbers, read_file, small_model, tell

SAMPLES = 480


def load(number):
    row = augment(read_file(number))
    row[0] = number / SAMPLES
    return {"row": row, "label": number % 4}


torch.manual_seed(0)
data = Dataset(list(range(SAMPLES)), transform=Compose([Lambda(load)]))
model = small_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
order, steps = [], 0
loader = DataLoader(data, batch_size=8, shuffle=True)
for _ in range(EPOCHS):
    for batch in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch["row"]), batch["label"]).backward()
        optimizer.step()
        steps += 1
        order += numbers(batch["row"], SAMPLES)
tell(steps, len(order), order)
