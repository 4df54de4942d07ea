"""Detection: a batch is a list of images of unlike sizes and a list of dicts with unlike numbers of boxes."""

import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
watch = Stopwatch()


class Scenes(Dataset):
    def __len__(self):
        return 3 * 1000

    def __getitem__(self, index):
        boxes = torch.full((1 + index % 5, 4), 0.5)
        return torch.zeros(3, 32 + index % 3 * 16, 48), {"boxes": boxes, "labels": torch.ones(len(boxes))}


def collate(samples):
    return tuple(zip(*samples, strict=True))


loader = DataLoader(Scenes(), batch_size=3, collate_fn=collate)
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 16, 3, 2), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 3), torch.nn.AdaptiveAvgPool2d(1)
)
head = torch.nn.Linear(32, 4)
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.01)

for images, targets in loader:
    losses = [
        (head(model(image[None]).flatten(1)) - target["boxes"]).abs().mean()
        for image, target in zip(images, targets, strict=True)
    ]
    optimizer.zero_grad()
    sum(losses).backward()
    optimizer.step()
    watch.step(len(images))
    if watch.seconds > 2:
        break
watch.tell()
