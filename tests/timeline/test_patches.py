"""Each patch is reversible: afterwards every entry point of torch is the original again."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fulltilt.timeline.patches import COLLECTIVES
from fulltilt.timeline.session import Session


def entry_points() -> dict[str, Any]:
    scaler, autocast = torch.amp.grad_scaler.GradScaler, torch.amp.autocast_mode.autocast
    loader, replica = torch.utils.data.DataLoader, torch.nn.parallel.DistributedDataParallel
    hooks = importlib.import_module("torch.optim.optimizer")
    points = {
        "init": vars(loader)["__init__"],
        "iter": vars(loader)["__iter__"],
        "backward": torch.autograd.backward,
        "grad": torch.autograd.grad,
        "scaler": vars(scaler)["step"],
        "autocast": vars(autocast)["__enter__"],
        "save": torch.save,
        "train": vars(torch.nn.Module)["train"],
        "synchronize": torch.cuda.synchronize,
        "replica": vars(replica)["__init__"],
        "pre": len(hooks._global_optimizer_pre_hooks),
        "post": len(hooks._global_optimizer_post_hooks),
    }
    points |= {name: vars(torch.Tensor).get(name, "inherited") for name in ("to", "cuda", "item", "tolist", "cpu")}
    points |= {name: getattr(torch.distributed, name) for name in COLLECTIVES}
    return points


def test_every_original_is_back(tmp_path: Path) -> None:
    before = entry_points()
    session = Session(torch, tmp_path, time.perf_counter_ns())
    session.install()
    during = entry_points()
    session.finish()
    assert entry_points() == before
    changed = {name for name in before if during[name] != before[name]}
    kept = {"to", "cuda"} if "torchvision.tv_tensors" in sys.modules else set()
    assert changed == set(before) - kept


def test_values_and_errors_pass_through(tmp_path: Path) -> None:
    session = Session(torch, tmp_path, time.perf_counter_ns())
    session.install()
    try:
        x = torch.ones(3, requires_grad=True)
        (x * 2).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [2.0, 2.0, 2.0]
        assert torch.ones(2).to(torch.float64).dtype == torch.float64
        assert torch.tensor(4.0).item() == 4.0
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.ones(1).sum().backward()
        with pytest.raises(ValueError, match="num_workers"):
            torch.utils.data.DataLoader([1], num_workers=-1)
    finally:
        session.finish()


def test_a_compiled_model_still_compiles_whole(tmp_path: Path) -> None:
    session = Session(torch, tmp_path, time.perf_counter_ns())
    session.install()
    try:

        def step(x: torch.Tensor) -> torch.Tensor:
            return (x.to(torch.float64) * 2).cpu().to(torch.float32)

        compiled = torch.compile(step, fullgraph=True, backend="eager")
        assert torch.equal(compiled(torch.ones(4)), torch.full((4,), 2.0))
    finally:
        session.finish()
        torch._dynamo.reset()
