"""A tile: a stretch of the job's time with whole steps in it, and the one that is being filled."""

from __future__ import annotations

from dataclasses import dataclass, field

from fulltilt.recorder.marks import Activity
from fulltilt.recorder.shelves import PHASE_OF_SHELF, SHELF, Shelves


@dataclass(frozen=True, slots=True)
class Tile:
    """A stretch of the job's time with ``steps`` steps in it. ``shelves`` add up to ``t1_ns - t0_ns``."""

    t0_ns: float
    t1_ns: float
    steps: int
    skipped: int
    batches: int
    samples: int | None
    epoch: int
    shelves: Shelves
    step_max_ns: float
    data_wait_max_ns: float
    sync_blocked_ns: float
    gpu: bool
    # What of it was not spent as in most steps: at rest it would be booked by itself.
    unusual: Shelves = field(default_factory=Shelves)

    @property
    def queueing_ns(self) -> float:
        """Host time a step that may queue work for a GPU."""
        busy = sum(self.shelves.phases.get(phase, 0.0) for phase in ("user", "backward", "optimizer"))
        return busy / max(self.steps, 1)


@dataclass(slots=True)
class OpenTile:
    """The tile under way, with what its shelves held when its last step ended."""

    t0_ns: float
    shelves: Shelves = field(default_factory=Shelves)
    unusual: Shelves = field(default_factory=Shelves)
    at_step_end: Shelves = field(default_factory=Shelves)
    steps: int = 0
    skipped: int = 0
    batches: int = 0
    samples: int | None = None
    step_max_ns: float = 0.0
    wait_max_ns: float = 0.0
    blocked_ns: float = 0.0

    def count(self, batches: int, samples: int | None) -> None:
        """So many batches and samples went into its steps; None where nobody knows how many samples."""
        self.batches += batches
        if samples is not None:
            self.samples = (self.samples or 0) + samples

    def set_apart(self, shelf: str, ns: float) -> None:
        """This much of a shelf was not spent as in most steps."""
        self.unusual.put(shelf, ns)
        if shelf in PHASE_OF_SHELF:
            self.unusual.phase(PHASE_OF_SHELF[shelf], ns)

    def set_step_apart(self) -> None:
        """The step that just ended took long: it did something that most steps do not. Its long waits are apart."""
        for shelf, ns in self.shelves.time.items():
            if shelf != SHELF[Activity.NEXT]:
                self.set_apart(shelf, max(0.0, ns - self.at_step_end.time.get(shelf, 0.0)))
        for after, ns in self.since_step().user_after.items():
            self.unusual.user(after, ns)

    def since_step(self) -> Shelves:
        """What has been booked since the last step ended."""
        return self.shelves.beyond(self.at_step_end)

    def close(self, t1_ns: float, epoch: int, gpu: bool) -> Tile:
        """The finished tile."""
        return Tile(
            t0_ns=self.t0_ns,
            t1_ns=t1_ns,
            steps=self.steps,
            skipped=self.skipped,
            batches=self.batches,
            samples=self.samples,
            epoch=epoch,
            shelves=self.shelves,
            step_max_ns=self.step_max_ns,
            data_wait_max_ns=self.wait_max_ns,
            sync_blocked_ns=self.blocked_ns,
            gpu=gpu,
            unusual=self.unusual,
        )
