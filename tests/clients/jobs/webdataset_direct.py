"""WebDataset: the pipeline drawn from as it is, without a DataLoader."""

import io
import tarfile
import tempfile
from pathlib import Path

import torch
import webdataset
from slow_data import read_file, small_model, tell

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
    return read_file(number), number % 4


shards = [str(folder / f"{shard}.tar") for shard in range(4)]
data = webdataset.WebDataset(shards, shardshuffle=False).map(decode).batched(8)
model = small_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
steps = samples = 0
for rows, labels in data:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(rows), torch.as_tensor(labels)).backward()
    optimizer.step()
    steps += 1
    samples += len(rows)
tell(steps, samples)
