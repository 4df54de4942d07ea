"""Steady state: fed steps against compute-only steps, turn by turn in one process."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from children import drain

from fulltilt.errors import StoppedEarly
from fulltilt.records import GpuReading, Sample
from fulltilt.train import Job, StepEnd, TrainSettings, train
from fulltilt.train.progress import TrainingScreen
from recipebench.measuring import Bench, mean_of, sampling

# After an epoch has begun, so many steps pass before they count.
WARM_UP_STEPS = 4
# At the end comes a longer stretch of fed steps, to see how busy the GPU is: its counters are slower than a turn.
LOOK_S = 3.0
# Epochs without a whole turn before the measuring gives up.
MOST_EPOCHS = 10


class Turns:
    """Fed and compute-only steps in turns within one process, so that both meet the same clocks and neighbours.

    Turns are short and many: a step that waits for the host takes up to a third longer from one second to the next.

    A turn begins and ends with a drained device; the compute-only turn does as many steps as the fed one before it. A
    fed turn in which an epoch ends begins anew: evaluation, checkpoint and the next order are no steady state.
    ``compute`` does so many steps and returns how many samples they had; None leaves the fed steps alone.
    """

    def __init__(
        self, compute: Callable[[int], int] | None, bench: Bench, *, turn_s: float = 0.5, turns: int = 21
    ) -> None:
        self.compute, self.device = compute, bench.device
        self.turn_s, self.turns = (0.02, 2) if bench.smoke else (turn_s, turns)
        self._look_s, self._looking = (0.02 if bench.smoke else LOOK_S), False
        self.readings: list[Sample] = []
        self._ratios: list[float] = []
        self._kept: list[GpuReading] = []
        self._totals: dict[str, list[tuple[int, float]]] = {}  # samples and seconds of each turn
        self._epoch, self._epochs = -1, 0
        self._steps = self._warm_up = self._served = 0
        self._began_s: float | None = None

    def fed_step(self, epoch: int, served: int) -> None:
        """A fed step has ended, ``served`` samples in all. Raises StoppedEarly when there were enough turns."""
        if epoch != self._epoch and not self._looking:
            self._epoch, self._warm_up, self._began_s = epoch, WARM_UP_STEPS, None
            self._epochs += 1
            if self._epochs > MOST_EPOCHS and "fed" not in self._totals:
                raise RuntimeError(f"{MOST_EPOCHS} epochs were each shorter than a turn of {self.turn_s} s")
        if self._warm_up:
            self._warm_up -= 1
        elif self._began_s is None:
            self._begin(served)
        else:
            self._steps += 1
            if time.perf_counter() - self._began_s >= self.turn_s:
                self._end(served)
                self._begin(served)

    def figures(self) -> dict[str, Any]:
        """Samples per second of both, their ratio turn by turn, and the GPU during the fed turns (%)."""
        if "fed" not in self._totals:
            raise RuntimeError("the run ended before it was measured: give it longer epochs, or more of them")
        turns = self._totals.values()
        rates = [sum(samples for samples, _ in turn) / sum(wall_s for _, wall_s in turn) for turn in turns]
        return {
            **dict(zip(self._totals, rates, strict=True)),
            **({"fed_over_compute": statistics.median(self._ratios), "ratios": self._ratios} if self._ratios else {}),
            "gpu_util_pct": mean_of([gpu.util_pct for gpu in self._kept]),
            "sm_active_pct": mean_of([gpu.sm_active_pct for gpu in self._kept]),
        }

    def _begin(self, served: int) -> None:
        drain(self.device)
        self.readings.clear()
        self._steps, self._served = 0, served
        self._began_s = time.perf_counter()

    def _end(self, served: int) -> None:
        assert self._began_s is not None
        drain(self.device)
        if self._looking:
            # The first reading covers the time before as well.
            self._kept = [sample.gpus[0] for sample in self.readings[1:] if sample.gpus]
            raise StoppedEarly("enough")
        fed = self._add("fed", served - self._served, self._began_s)
        if self.compute is not None:
            began_s = time.perf_counter()
            samples = self.compute(self._steps)
            drain(self.device)
            self._ratios.append(round(fed / self._add("compute_only", samples, began_s), 4))
        if len(self._totals["fed"]) >= self.turns:
            self._looking, self.turn_s = True, self._look_s

    def _add(self, name: str, samples: int, began_s: float) -> float:
        """Note a turn that has just ended; returns its samples per second."""
        wall_s = time.perf_counter() - began_s
        self._totals.setdefault(name, []).append((samples, wall_s))
        return samples / wall_s


def steps_of(step: Callable[[Any], None], batch: Any, samples: int, warm_up: int = 5) -> Callable[[int], int]:
    """``step`` on one batch, again and again, as Turns asks for it; warm already."""

    def several(count: int) -> int:
        for _ in range(count):
            step(batch)
        return samples * count

    several(warm_up)
    return several


def engine_turns(job: Job, settings: TrainSettings, out: Path, turns: Turns) -> dict[str, Any]:
    """The figures of a job on the engine, from its second epoch on: then everything is where it stays."""
    served = 0

    def on_step(end: StepEnd) -> None:
        nonlocal served
        served += settings.batch_size * settings.accumulation
        if end.epoch > 0:
            turns.fed_step(end.epoch, served)

    with sampling(turns.readings), contextlib.suppress(StoppedEarly):
        train(job, settings, out, fresh=True, screen=TrainingScreen(out, speaks=False), on_step=on_step)
    return turns.figures()
