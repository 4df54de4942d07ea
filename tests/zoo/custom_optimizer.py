"""An optimizer of the script's own, with its update written in Python."""

import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
watch = Stopwatch()


class SignDescent(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weights in group["params"]:
                average = self.state[weights].setdefault("average", torch.zeros_like(weights))
                average.lerp_(weights.grad, 0.1)
                weights.sub_(average.sign(), alpha=group["lr"])


loader = DataLoader(TensorDataset(torch.randn(16000, 512), torch.randint(4, (16000,))), batch_size=16)
model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 4))
optimizer = SignDescent(model.parameters(), lr=1e-4)

for inputs, labels in loader:
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.step(len(inputs))
    if watch.seconds > 2:
        break
watch.tell()
