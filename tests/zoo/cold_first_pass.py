"""Samples are read in many small pieces from a disk in the first pass; in the second they lie in RAM."""

import os
import tempfile

import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
watch = Stopwatch()
SAMPLES, PIECES, PIECE, SIZE = 400, 64, 4096, 128 << 20


class Pieces(Dataset):
    def __init__(self, path):
        self.path = path

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        file = os.open(self.path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        places = [(index * PIECES + piece) * 7919 % (SIZE // PIECE) for piece in range(PIECES)]
        data = b"".join(os.pread(file, PIECE, place * PIECE) for place in places)
        os.close(file)
        return torch.tensor([len(data), data[0], data[-1]], dtype=torch.float32).repeat(64), index % 4


if __name__ == "__main__":
    with tempfile.NamedTemporaryFile() as stored:
        for _ in range(SIZE >> 20):
            stored.write(os.urandom(1 << 20))
        stored.flush()
        os.fsync(stored.fileno())
        os.posix_fadvise(stored.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        loader = DataLoader(Pieces(stored.name), batch_size=8, num_workers=1)  # <- here
        model = torch.nn.Sequential(torch.nn.Linear(192, 1024), torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        for _ in range(2):
            for inputs, labels in loader:
                loss = torch.nn.functional.cross_entropy(model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                watch.step(len(inputs))
        watch.tell()
