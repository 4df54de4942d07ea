"""The COD job as loadtune wants it: it makes the DataLoader itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from loadtune import Workload

from tunebench import job as jobs


def get_workload() -> Workload:
    """Read by loadtune's command."""
    small = bool(os.environ["TUNEBENCH_SMALL"])

    def dataset() -> Any:
        data = jobs.Endless(jobs.pictures("cod", Path(os.environ["TUNEBENCH_PICTURES"]), small), 64 if small else 384)
        data.wait_s = jobs.SMALL_WAIT_S if small else 0.0
        return data

    def step(model: Any, optimizer: Any, batch: Any, device: Any) -> torch.Tensor:
        images = [part.to(device, non_blocking=True) for part in batch]
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=torch.cuda.is_available()):
            loss = jobs.cod_loss(model, images)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return Workload(
        name="cod",
        make_dataset=dataset,
        make_model=lambda: jobs.network("cod", small),
        make_optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-5),
        train_step=step,
        default_batch_size=4 if small else 64,
    )
