"""40 short epochs, and the workers are started anew for each."""

import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
watch = Stopwatch()

if __name__ == "__main__":
    samples = TensorDataset(torch.randn(64, 64), torch.randint(4, (64,)))
    loader = DataLoader(samples, batch_size=16, shuffle=True, num_workers=2)  # <- here
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(40):
        for number, (inputs, labels) in enumerate(loader):
            watch.arrived("data_wait" if number else "epoch_turnover")
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watch.step(len(inputs))
    watch.tell()
