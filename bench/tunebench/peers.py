"""What others ship, on the COD job: two finders of the largest batch, and loadtune's tuner of the loader."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tunebench import job as jobs
from tunebench.figures import Figures

MOST_DOUBLINGS = 12
# accelerate takes a tenth off until it fits, and each try that does not fit costs a second.
FIRST_TRY = 2048
WORKLOAD = Path(__file__).with_name("loadtune_workload.py")


def measure(name: str, folder: Path, figures: Figures, small: bool) -> None:
    """What a peer found and its seconds; where it cannot be imported or fails, why."""
    peer = {"accelerate": _accelerate, "lightning": _lightning, "loadtune": _loadtune}[name]
    figures.note("peers", **{name: _guarded(peer, folder, small)})


def _guarded(peer: Callable[[Path, bool], dict[str, Any]], folder: Path, small: bool) -> dict[str, Any]:
    began_s = time.monotonic()
    try:
        found = peer(folder, small)
    except (Exception, SystemExit) as error:
        return {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
    return {**found, "seconds": time.monotonic() - began_s}


def _batch(size: int, small: bool, device: str) -> list[torch.Tensor]:
    side = 64 if small else 384
    return [torch.randn(size, 3, side, side, device=device), torch.zeros(size, 1, side, side, device=device)]


def _accelerate(_: Path, small: bool) -> dict[str, Any]:
    """Begins with a batch that is too large and takes a tenth off until it fits: it measures no speed."""
    from accelerate.utils import find_executable_batch_size

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tried: list[int] = []
    # A library that wants memory for its handle when none is left fails in a way that accelerate does not know.
    jobs.trainer(jobs.network("cod", small).to(device), jobs.cod_loss, torch.device(device))(_batch(1, small, device))

    @find_executable_batch_size(starting_batch_size=16 if small else FIRST_TRY)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        step = jobs.trainer(jobs.network("cod", small).to(device), jobs.cod_loss, torch.device(device))
        for _ in range(2):
            step(_batch(batch_size, small, device))
        return batch_size

    found = train()
    return {"batch": found, "tries": len(tried), "version": importlib.metadata.version("accelerate")}


def _lightning(_: Path, small: bool) -> dict[str, Any]:
    """Doubles the batch until memory ends and takes the last that fitted: it measures no speed either."""
    import lightning
    from lightning.pytorch.tuner import Tuner
    from torch.utils.data import DataLoader, TensorDataset

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 1  # set by the finder
            self.model: nn.Module = jobs.network("cod", small)

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            return jobs.cod_loss(self.model, batch)

        def train_dataloader(self) -> Any:
            samples = 64 if small else 8192
            parts = (part.expand(samples, -1, -1, -1) for part in _batch(1, small, "cpu"))
            return DataLoader(TensorDataset(*parts), self.batch_size)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(default_root_dir=tempfile.mkdtemp(), max_epochs=1, precision="bf16-mixed", **quiet)
    trials, first = (2, 4) if small else (MOST_DOUBLINGS, 64)
    found = Tuner(trainer).scale_batch_size(Module(), steps_per_trial=2, max_trials=trials, init_val=first)
    return {"batch": found, "version": importlib.metadata.version("lightning")}


def _loadtune(folder: Path, small: bool) -> dict[str, Any]:
    """Sweeps a few numbers of workers in turn; its trials run in this process (--fast), which saves it the imports."""
    import os

    from loadtune.cli import main

    pictures = folder / "cod" / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    os.environ["TUNEBENCH_PICTURES"] = str(pictures)
    os.environ["TUNEBENCH_SMALL"] = "1" if small else ""
    steps = ["--steps", "20" if small else "60", "--warmup", "4"]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        report = folder / "loadtune.md"
        main(["tune", str(WORKLOAD), "--fast", "--no-plots", "--out", str(report), *steps])
    best = re.findall(r"best overall: (.+)", said.getvalue())
    found = best[-1] if best else said.getvalue()[-300:]
    return {"found": found, "version": importlib.metadata.version("loadtune")}
