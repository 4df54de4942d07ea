"""No optimizer: the weights are updated by hand."""

import torch
from stopwatch import Stopwatch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
watch = Stopwatch()
loader = DataLoader(TensorDataset(torch.randn(16000, 512), torch.randint(4, (16000,))), batch_size=16)
inner = (torch.randn(512, 6144) / 23).requires_grad_()
outer = (torch.randn(6144, 4) / 78).requires_grad_()

for inputs, labels in loader:
    loss = torch.nn.functional.cross_entropy(torch.relu(inputs @ inner) @ outer, labels)
    loss.backward()
    with torch.no_grad():
        for weights in (inner, outer):
            weights.sub_(weights.grad, alpha=0.01)
            weights.grad = None
    watch.step(len(inputs))
    if watch.seconds > 2:
        break
watch.tell()
