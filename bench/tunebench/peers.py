"""Finders of the largest batch that others ship, on the job's own network: what they find, and in what time."""

from __future__ import annotations

import importlib.metadata
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tunebench.job import network

MOST_DOUBLINGS = 12


def batch_finders(smoke: bool) -> dict[str, Any]:
    """Each finder by name; where it cannot be imported or fails, why."""
    return {name: _guarded(finder, smoke) for name, finder in (("accelerate", _accelerate), ("lightning", _lightning))}


def _guarded(finder: Callable[[bool], dict[str, Any]], smoke: bool) -> dict[str, Any]:
    began = time.monotonic()
    try:
        found = finder(smoke)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
    return {**found, "seconds": time.monotonic() - began}


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor) -> None:
    with torch.autocast(images.device.type, dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(
            model(images), torch.zeros(len(images), dtype=torch.long, device=images.device)
        )
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()


def _accelerate(smoke: bool) -> dict[str, Any]:
    """Begins with a batch that is too large and takes a tenth off until it fits: it measures no speed."""
    from accelerate.utils import find_executable_batch_size

    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = 64 if smoke else 384
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=16 if smoke else 4096)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        model = network(device).to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            _step(model, optimizer, torch.randn(batch_size, 3, size, size, device=device))
        return batch_size

    found = train()
    return {"batch": found, "tries": len(tried), "version": importlib.metadata.version("accelerate")}


def _lightning(smoke: bool) -> dict[str, Any]:
    """Doubles the batch until memory ends and takes the last that fitted: it measures no speed either."""
    import lightning
    from lightning.pytorch.tuner import Tuner
    from torch.utils.data import DataLoader, TensorDataset

    size = 64 if smoke else 384

    class Job(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 4 if smoke else 64
            self.model = network("cuda" if torch.cuda.is_available() else "cpu")

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            (images,) = batch
            labels = torch.zeros(len(images), dtype=torch.long, device=images.device)
            return nn.functional.cross_entropy(self.model(images), labels)

        def train_dataloader(self) -> Any:
            samples = 64 if smoke else 8192
            return DataLoader(TensorDataset(torch.zeros(1, 3, size, size).expand(samples, -1, -1, -1)), self.batch_size)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(default_root_dir=tempfile.mkdtemp(), max_epochs=1, precision="bf16-mixed", **quiet)
    job = Job()
    trials = 2 if smoke else MOST_DOUBLINGS
    found = Tuner(trainer).scale_batch_size(job, mode="power", steps_per_trial=2, max_trials=trials)
    return {"batch": found, "version": importlib.metadata.version("lightning")}
