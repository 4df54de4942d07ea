"""A rank of a torchrun job. On the first start rank 1 is killed at step 5; torchrun starts all ranks anew."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from fulltilt.train import checkpoint
from fulltilt.train.config import TrainSettings
from fulltilt.train.exit_code import exit_code_of
from fulltilt.train.loop import train
from fulltilt.train.progress import TrainingScreen
from fulltilt.train.train_state import StepEnd
from tests.faults import victim


def main(out: Path) -> int:
    torch.set_num_threads(1)
    rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    checkpoint.claim(out)  # the files of the test lie in it, too

    def note(end: StepEnd) -> None:
        with (out / f"chain.{rank}.txt").open("a") as file:
            file.write(f"{end.step} {victim.fingerprint(end)} {end.samples}\n")
        if rank == 1 and end.step == 5 and restarts == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    settings = TrainSettings(**victim.DEFAULTS)
    screen = TrainingScreen(out, speaks=False)
    return exit_code_of(lambda: train(victim.make_job(), settings, out, screen=screen, on_step=note), out)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
