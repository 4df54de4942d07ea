"""Curves are drawn after each validation: the model is still in eval mode, but it is the script that takes the time."""

import time

import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
watch = Stopwatch()
samples = TensorDataset(torch.randn(64 * 20, 512), torch.randint(4, (64 * 20,)))
train_loader = DataLoader(samples, batch_size=64)
valid_loader = DataLoader(samples, batch_size=64)
model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def train():
    model.train()
    for inputs, labels in train_loader:
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.step(len(inputs))


@torch.no_grad()
def validate():
    model.eval()
    for inputs, _labels in valid_loader:
        model(inputs)


def draw_curves():
    time.sleep(0.4)  # <- here


while watch.seconds < 3:
    train()
    with watch.part("validation"):
        validate()
    with watch.part("host_code"):
        draw_curves()
watch.tell()
