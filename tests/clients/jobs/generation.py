"""A loop in which the model writes what it is then trained on, in evaluation mode: no validation."""

import torch
from slow_data import SlowRows, tell
from torch.utils.data import DataLoader


class Writer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(50, 32)
        self.read = torch.nn.GRU(32, 32, batch_first=True)
        self.last = torch.nn.Linear(32, 50)

    def forward(self, tokens):
        return self.last(self.read(self.embed(tokens))[0])


@torch.no_grad()
def generate(tokens):
    writer.eval()
    for _ in range(4):
        tokens = torch.cat([tokens, writer(tokens)[:, -1].softmax(-1).multinomial(1)], 1)
    writer.train()
    return tokens


torch.manual_seed(0)
writer = Writer()
optimizer = torch.optim.Adam(writer.parameters())
steps = samples = 0
for _, labels in DataLoader(SlowRows(640), batch_size=8, shuffle=True):
    tokens = generate(labels[:, None])
    reward = (tokens[:, 1:] < 25).float().mean(1)
    chosen = writer(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None]).sum((1, 2))
    optimizer.zero_grad()
    (-(reward - reward.mean()) * chosen).mean().backward()
    optimizer.step()
    steps += 1
    samples += len(labels)
tell(steps, samples)
