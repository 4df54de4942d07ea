"""torchdata.nodes: no DataLoader at all, one node behind the other."""

import torch
from slow_data import SlowRows, small_model, tell
from torch.utils.data import RandomSampler, default_collate
from torchdata.nodes import Batcher, Loader, Mapper, SamplerWrapper

rows_of = SlowRows(640)
node = SamplerWrapper(RandomSampler(rows_of))
node = Mapper(Batcher(Mapper(node, rows_of.__getitem__), batch_size=8), default_collate)
loader = Loader(node)
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
