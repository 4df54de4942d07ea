"""Reinforcement learning: an environment in Python between the calls of a small policy, then steps on what it saw."""

import json
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
policy = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 2))
optimizer = torch.optim.Adam(policy.parameters())
steps = samples = 0
in_environment_s = 0.0


def environment(action):
    state = 0
    for turn in range(4000):
        state += turn * action
    return torch.randn(8)


@torch.no_grad()
def rollout():
    global in_environment_s
    state, seen = torch.randn(8), []
    for _ in range(256):
        action = policy(state).argmax().item()
        seen.append(state)
        began_s = time.perf_counter()
        state = environment(action)
        in_environment_s += time.perf_counter() - began_s
    return torch.stack(seen)


began_training_s = time.perf_counter()
while time.perf_counter() - began_training_s < 3:
    visited = rollout()
    if not steps:
        began_training_s, in_environment_s = time.perf_counter(), 0.0  # before the first step everything is start-up
    for _ in range(3):
        for (states,) in DataLoader(TensorDataset(visited), batch_size=64, shuffle=True):
            optimizer.zero_grad()
            policy(states).square().mean().backward()
            optimizer.step()
            steps += 1
            samples += len(states)
with Path("seconds.json").open("w") as file:
    json.dump({"environment": in_environment_s, "training": time.perf_counter() - began_training_s}, file)
print(json.dumps({"steps": steps, "samples": samples}))
