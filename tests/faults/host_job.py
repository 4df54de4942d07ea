"""A rank of an elastic job over several hosts. It notes which samples it trains on before anybody can use them."""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import torch

from fulltilt.train.checkpoint import newest_complete
from fulltilt.train.config import TrainSettings
from fulltilt.train.exit_code import exit_code_of
from fulltilt.train.job import Job
from fulltilt.train.loop import train
from fulltilt.train.progress import TrainingScreen
from fulltilt.train.train_state import StepEnd

SAMPLES, EPOCHS, BATCH = 300, 2, 5


class Numbered:
    """Samples that carry their own index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.full((4,), index / SAMPLES)


class Journal:
    """What this process did: one line a micro-batch, written before its gradient reaches the other ranks."""

    def __init__(self, out: Path) -> None:
        found = newest_complete(out / "checkpoints").checkpoint
        self.step = self.resumed = found.step if found is not None else 0
        self.own = uuid.uuid4().hex
        self._began_s = time.time()
        self._path = out / f"journal.{self.own}.jsonl"
        self._start: str | None = None

    def write(self, **line: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        ids, inputs = batch
        self.write(step=self.step + 1, ids=ids.tolist())
        # Long enough for a host to die in the middle; and while alone, for the other to come back before the end.
        time.sleep(0.05 if os.environ["WORLD_SIZE"] == "2" else 0.5)
        return (model(inputs).squeeze(1) - inputs.sum(1)).pow(2).mean()

    def on_step(self, end: StepEnd) -> None:
        if self._start is None:
            names = end.state.group.gather(self.own)
            self._start = str(names[0])
            self.write(start=self._start, world=len(names), began_s=self._began_s, resumed=self.resumed)
        self.step = end.step


def main(out: Path) -> int:
    torch.set_num_threads(1)
    journal = Journal(out)
    torch.manual_seed(0)
    job = Job(model=torch.nn.Linear(4, 1), loss=journal.loss, data=Numbered())
    settings = TrainSettings(
        epochs=EPOCHS, batch_size=BATCH, save_every=4, device="cpu", hang_timeout_s=8.0, record=False, lr=0.01
    )
    screen = TrainingScreen(out, speaks=os.environ["RANK"] == "0")
    return exit_code_of(lambda: train(job, settings, out, screen=screen, on_step=journal.on_step), out)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
