"""As with a streamed data set of Hugging Face: an IterableDataset in shards over workers, dicts, no length."""

import json

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

torch.set_num_threads(1)


class Stream(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        for shard in range(worker.id, 4, worker.num_workers):
            for number in range(25):
                yield {"input_ids": torch.arange(16) + shard, "labels": torch.tensor(number % 4)}


loader = DataLoader(Stream(), batch_size=8, num_workers=2)
model = torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.Flatten(), torch.nn.Linear(16 * 32, 4))
optimizer = torch.optim.AdamW(model.parameters())
steps = samples = 0
for _epoch in range(2):
    for batch in loader:
        torch.nn.functional.cross_entropy(model(batch["input_ids"]), batch["labels"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        samples += len(batch["labels"])

print(json.dumps({"steps": steps, "samples": samples}))
