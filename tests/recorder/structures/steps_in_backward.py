"""As with LOMO and torchtune: each parameter has an optimizer of its own, which steps in a hook inside backward."""

import _thread
import json
import sys
import threading

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
optimizers = {parameter: torch.optim.Adam([parameter], foreach=False) for parameter in model.parameters()}


def step(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


def step_on_another_thread(parameter):
    """On a GPU, backward and its hooks run on a thread of autograd's, which Python has not started."""
    done = threading.Semaphore(0)
    _thread.start_new_thread(lambda: (step(parameter), done.release()), ())
    done.acquire()


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(step_on_another_thread if "thread" in sys.argv else step)
steps = samples = 0
for _ in range(6):
    for (inputs,) in DataLoader(TensorDataset(torch.randn(2000, 64)), batch_size=20):
        model(inputs).square().mean().backward()
        steps += 1
        samples += len(inputs)
print(json.dumps({"steps": steps, "samples": samples}))
