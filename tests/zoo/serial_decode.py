"""Decoding takes much CPU time and the DataLoader has no workers."""

import zlib

import numpy as np
import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
watch = Stopwatch()


class CompressedImages(Dataset):
    def __init__(self):
        pixels = np.random.default_rng(0).integers(0, 16, (3, 256, 256), dtype=np.uint8)
        self.packed = zlib.compress(pixels.tobytes())

    def __len__(self):
        return 8000

    def __getitem__(self, index):
        image = np.frombuffer(zlib.decompress(self.packed), np.uint8).reshape(3, 256, 256)
        return torch.from_numpy(image[:, ::16, ::16].astype(np.float32) / 255).flatten(), index % 4


loader = DataLoader(CompressedImages(), batch_size=16)  # <- here
model = torch.nn.Sequential(torch.nn.Linear(768, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for inputs, labels in loader:
    watch.arrived()
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.step(len(inputs))
    if watch.seconds > 2:
        break
watch.tell()
