"""How the script gets into its training loop: the calls that stand on the stack whatever the step is doing.

Where a library owns the loop, the script's line that costs the time is always the same (``trainer.train()``), and says
nothing. Such lines are on the stack at backward, in the optimizer and at next() alike; lines of the loop are not.
"""

from __future__ import annotations

from types import CodeType, FrameType

from fulltilt.recorder.marks import Activity
from fulltilt.recorder.stacks import Spot, spots

PARTS_OF_A_STEP = frozenset({Activity.NEXT, Activity.BACKWARD, Activity.OPTIMIZER})
EVERY_STEP_HAS = (Activity.BACKWARD, Activity.OPTIMIZER)
LOOKS_AT_EACH = 3


class WayIn:
    """Learns in the first steps, on the training thread, which calls lead into the loop.

    ``loop`` are the functions that hold it, and those that called them: whatever they are, they make no batches.
    """

    def __init__(self) -> None:
        self.spots: frozenset[Spot] = frozenset()
        self.loop: frozenset[CodeType] = frozenset()
        self.learning = True
        self._common: frozenset[Spot] | None = None
        self._holding: frozenset[CodeType] | None = None
        self._looks: dict[Activity, int] = {}

    def see(self, activity: Activity, frame: FrameType) -> None:
        """Take in the stack at the beginning of an activity, if it is a part of a step."""
        if activity not in PARTS_OF_A_STEP or self._looks.get(activity, 0) == LOOKS_AT_EACH:
            return
        here = spots(frame)
        functions = frozenset(code for code, _ in here)
        self._common = here if self._common is None else self._common & here
        self._holding = functions if self._holding is None else self._holding & functions
        self._looks[activity] = self._looks.get(activity, 0) + 1
        if len(self._looks) > 1:
            self.spots, self.loop = self._common, self._holding
        self.learning = any(self._looks.get(part, 0) < LOOKS_AT_EACH for part in EVERY_STEP_HAS)
