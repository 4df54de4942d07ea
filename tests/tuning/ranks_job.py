"""Two ranks that starve without workers: each sample sleeps. Each writes a file with hashes of weights and samples.

The file also tells how many collectives there were. Arguments: batches, the folder of those files, and what is special
about rank 1, if anything: "own_sampler", "dies" or "pauses" in the middle.
"""

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BATCHES_A_PASS, BATCH = 150, 4


class Slow(Dataset):
    def __init__(self):
        self.samples = torch.randn(2 * BATCHES_A_PASS * BATCH, 32)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        time.sleep(0.01)
        return self.samples[index], index


class OwnSampler(DistributedSampler):
    """May depend on anything."""

    def __iter__(self):
        yield from super().__iter__()


def main(batches, out, special):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    special = special if rank == 1 else ""
    data = Slow()
    sampler = (OwnSampler if special == "own_sampler" else DistributedSampler)(data, seed=0)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples, drawn = hashlib.sha256(), 0
    for epoch in range(batches // BATCHES_A_PASS):
        sampler.set_epoch(epoch)
        for inputs, indices in loader:
            samples.update(inputs.numpy().tobytes() + indices.numpy().tobytes())
            loss = torch.nn.functional.cross_entropy(model(inputs), indices % 4)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.04)
            drawn += 1
            if drawn == batches // 4 and special == "dies":
                os._exit(7)
            if drawn == batches // 4 and special == "pauses":
                time.sleep(15)
    collectives = dist.group.WORLD._get_sequence_number_for_group()
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    told = f"weights {hashlib.sha256(weights).hexdigest()}\nsamples {samples.hexdigest()}\ncollectives {collectives}\n"
    (out / f"{rank}.txt").write_text(told)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "")
