"""Whether a job goes on training without its loaders: there is nothing left to measure then."""

from __future__ import annotations

# A training that has had no batch of a DataLoader for so long, and so many steps, will have none later either.
NEVER_ANY_S = 20.0
# One that has had some keeps them, as itertools.cycle does: the next epochs come without the loader.
NO_MORE_S = 5.0
LEAST_STEPS = 50


class Drought:
    """Told after each step how many batches all loaders have given so far."""

    def __init__(self) -> None:
        self._batches: int | None = None
        self._since_s = 0.0
        self._since_step = 0

    def lasts(self, now_s: float, steps: int, batches: int) -> bool:
        """Whether no batch has come for so long that none will."""
        if batches != self._batches:
            self._batches, self._since_s, self._since_step = batches, now_s, steps
        patience_s = NO_MORE_S if batches else NEVER_ANY_S
        return now_s - self._since_s > patience_s and steps - self._since_step > LEAST_STEPS
