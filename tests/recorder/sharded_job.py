"""A job with fully_shard that times its own collectives: ``torchrun sharded_job.py DEVICE BATCH WIDTH STEPS``."""

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

device, (batch, width, steps) = sys.argv[1], map(int, sys.argv[2:])
torch.set_num_threads(1)
torch.manual_seed(0)
calls = {"all_gather": 0, "reduce_scatter": 0}
inside, inside_s, seconds = 0, 0.0, []


def timed(original: Any, kind: str | None = None) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        global inside, inside_s
        begun = time.perf_counter()
        inside += 1
        try:
            return original(*args, **kwargs)
        finally:
            inside -= 1
            if not inside:  # the outermost: torch's own functions call each other
                inside_s += time.perf_counter() - begun
                if kind is not None:
                    calls[kind] += 1

    return call


for name in ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single"):
    if hasattr(dist, name):
        setattr(dist, name, timed(getattr(dist, name), "all_gather" if name[0] == "a" else "reduce_scatter"))
dist.Work.wait = timed(dist.Work.wait)  # type: ignore[method-assign]

if device == "cuda":
    torch.cuda.set_device(0)
dist.init_process_group("nccl" if device == "cuda" else "gloo")
mesh = init_device_mesh(device, (dist.get_world_size(),))
model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width)).to(device)
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for (inputs,) in DataLoader(TensorDataset(torch.randn(batch * steps, width)), batch_size=batch):
    optimizer.zero_grad()
    model(inputs.to(device)).square().mean().backward()
    optimizer.step()
    seconds.append(inside_s)
told = json.dumps({"rank": dist.get_rank(), **calls, "seconds": seconds})
sys.stdout.write(f"TRUTH {told}\n")  # in one piece, beside the other rank
dist.destroy_process_group()
