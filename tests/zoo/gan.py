"""A GAN: two optimizers and three backward passes make one iteration."""

import torch
from stopwatch import Stopwatch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
watch = Stopwatch()
loader = DataLoader(TensorDataset(torch.randn(4000, 64)), batch_size=16, shuffle=True, drop_last=True)
generator = nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 64))
critic = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-4)
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-4)
judge = nn.BCEWithLogitsLoss()
real, fake = torch.ones(16, 1), torch.zeros(16, 1)

for (images,) in loader:
    invented = generator(torch.randn(16, 16))
    critic_optimizer.zero_grad()
    judge(critic(images), real).backward()
    judge(critic(invented.detach()), fake).backward()
    critic_optimizer.step()
    generator_optimizer.zero_grad()
    judge(critic(invented), real).backward()
    generator_optimizer.step()
    watch.step(len(images))
    if watch.seconds > 2:
        break
watch.tell()
