"""timm: create_loader and create_model, as its train.py has them."""

import torch
from PIL import Image
from slow_data import EPOCHS, read_file, tell
from timm.data import create_loader
from timm.models import create_model
from timm.optim import create_optimizer_v2
from torch.utils.data import Dataset


class Images(Dataset):
    transform = None

    def __len__(self):
        return 240

    def __getitem__(self, index):
        read_file(index)
        return self.transform(Image.new("RGB", (40, 40), (index, 0, 0))), index % 4


torch.manual_seed(0)
loader = create_loader(
    Images(), (3, 32, 32), 8, is_training=True, use_prefetcher=False, num_workers=0, persistent_workers=False,
    device=torch.device("cpu"),
)  # fmt: skip
model = create_model("test_resnet", num_classes=4)
optimizer = create_optimizer_v2(model, opt="sgd", lr=0.01)
steps = samples = 0
for _ in range(EPOCHS):
    for images, labels in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        steps += 1
        samples += len(images)
tell(steps, samples)
