"""WebDataset: shards behind a DataLoader."""

import io
import tarfile
import tempfile
from pathlib import Path

import torch
import webdataset
from slow_data import EPOCHS, numbers, read_file, small_model, tell, weights_of
from torch.utils.data import DataLoader

SAMPLES = 640
folder = Path(tempfile.mkdtemp())
for shard in range(4):
    with tarfile.open(folder / f"{shard}.tar", "w") as tar:
        for number in range(160):
            text = str(160 * shard + number).encode()
            info = tarfile.TarInfo(f"{160 * shard + number:06d}.txt")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text))


def decode(sample):
    number = int(sample["txt"])
    row = read_file(number)
    row[0] = number / SAMPLES
    return row, number % 4


shards = [str(folder / f"{shard}.tar") for shard in range(4)]
data = webdataset.WebDataset(shards, shardshuffle=False).map(decode).batched(8)
model = small_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
order, steps = [], 0
loader = DataLoader(data, batch_size=None)
for _ in range(EPOCHS):
    for rows, labels in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(rows), torch.as_tensor(labels)).backward()
        optimizer.step()
        steps += 1
        order += numbers(rows, SAMPLES)
tell(steps, len(order), order, weights_of(model))
