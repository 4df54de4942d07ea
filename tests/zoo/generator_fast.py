"""No DataLoader: a generator cuts random windows out of one long text, as small language models are trained."""

import torch
from stopwatch import Stopwatch

torch.set_num_threads(1)
watch = Stopwatch()
text = torch.randint(64, (100_000,))


def get_batches(length=32, count=4):
    while True:
        starts = torch.randint(len(text) - length - 1, (count,))
        windows = torch.stack([text[start : start + length + 1] for start in starts])
        yield windows[:, :-1], windows[:, 1:]


model = torch.nn.Sequential(
    torch.nn.Embedding(64, 64), torch.nn.TransformerEncoderLayer(64, 4, 256, batch_first=True), torch.nn.Linear(64, 64)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for tokens, following in get_batches():
    loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), following.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.step(len(tokens))
    if watch.seconds > 2:
        break
watch.tell()
