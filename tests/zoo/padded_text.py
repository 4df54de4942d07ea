"""Short texts are all padded to 128 tokens: most of what is computed is padding."""

import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
watch = Stopwatch()
LONGEST = 128


class Texts(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        tokens = torch.zeros(LONGEST, dtype=torch.long)
        length = 5 + index % 25
        tokens[:length] = 7
        return {"input_ids": tokens, "attention_mask": (tokens > 0).long(), "label": index % 4}


loader = DataLoader(Texts(), batch_size=4)  # <- here
embed = torch.nn.Embedding(1000, 32)
model = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
head = torch.nn.Linear(32, 4)
optimizer = torch.optim.AdamW([*embed.parameters(), *model.parameters(), *head.parameters()], lr=1e-3)

for batch in loader:
    hidden = model(embed(batch["input_ids"]), src_key_padding_mask=batch["attention_mask"] == 0)
    loss = torch.nn.functional.cross_entropy(head(hidden[:, 0]), batch["label"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.step(len(batch["label"]))
    if watch.seconds > 2:
        break
watch.tell()
