"""Somebody else's process: keeps the GPU at work until it is told to stop."""

import torch

matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
print("at work", flush=True)
while True:
    for _ in range(50):
        matrix @ matrix
    torch.cuda.synchronize()
