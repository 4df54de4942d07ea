"""Nothing wrong: one worker keeps up with a convolutional network."""

import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
watch = Stopwatch()

if __name__ == "__main__":
    samples = TensorDataset(torch.randn(4000, 3, 32, 32), torch.randint(10, (4000,)))
    loader = DataLoader(samples, batch_size=16, shuffle=True, num_workers=1)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 128, 3, 2), torch.nn.ReLU(), torch.nn.Flatten()
    )
    head = torch.nn.Linear(128 * 14 * 14, 10)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-3)
    for images, labels in loader:
        loss = torch.nn.functional.cross_entropy(head(model(images)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.step(len(images))
        if watch.seconds > 2:
            break
    watch.tell()
