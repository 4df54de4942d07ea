"""Data that takes its time to read, as from a network file system, and the last line that each job prints."""

import hashlib
import json
import os
import random
import time

import torch
from torch.utils.data import Dataset

# Threads that wait for each other crawl on a busy machine, and then it is the computing that holds a job up.
torch.set_num_threads(1)
READ_S = float(os.environ.get("READ_S", "0.004"))
AUGMENTS = bool(os.environ.get("AUGMENT"))
EPOCHS = int(os.environ.get("EPOCHS", "1"))


def read_file(number: int) -> torch.Tensor:
    time.sleep(READ_S)
    generator = torch.Generator().manual_seed(number)
    return torch.randn(16, generator=generator)


def augment(row: torch.Tensor) -> torch.Tensor:
    return row + 0.01 * random.random() if AUGMENTS else row


class SlowRows(Dataset):
    """Pairs of a row and a label; the first value of a row is the number of its sample."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        row = augment(read_file(index))
        row[0] = index / self.samples
        return row, index % 4


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))


def numbers(rows: torch.Tensor, samples: int) -> list[int]:
    return [round(float(value) * samples) for value in rows[:, 0]]


def weights_of(model: torch.nn.Module) -> str:
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()


def tell(steps: int, samples: int | None, order: list[int] | None = None, weights: str | None = None) -> None:
    """What the library itself has counted, and the numbers of the samples in the order in which they came."""
    print("COUNTED " + json.dumps({"steps": steps, "samples": samples, "order": order, "weights": weights}))
