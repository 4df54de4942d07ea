"""LitData: an optimised data set, streamed."""

import tempfile

import torch
from litdata import StreamingDataLoader, StreamingDataset, optimize
from slow_data import read_file, small_model, tell


def number_of(index):
    return index


class Rows(StreamingDataset):
    def __getitem__(self, index):
        number = super().__getitem__(index)
        return read_file(number), number % 4


if __name__ == "__main__":
    folder = tempfile.mkdtemp()
    optimize(fn=number_of, inputs=list(range(480)), output_dir=folder, chunk_size=80, num_workers=1)
    loader = StreamingDataLoader(Rows(folder, shuffle=True), batch_size=8)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps = samples = 0
    for rows, labels in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(rows), labels).backward()
        optimizer.step()
        steps += 1
        samples += len(rows)
    tell(steps, samples)
