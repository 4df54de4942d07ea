"""When the host is given a lead over the GPU: work that is all queued beforehand shows how long the GPU takes for it.

The observer asks for a lead, the training thread queues the delay that gives it.
"""

from __future__ import annotations

from fulltilt.recorder.marks import Point

# A lead is given at this step and then each time there are four times as many, if the GPU is not behind.
# Each costs about a step's worth of host work, so that a run of 100 steps loses 2 % and one of 1,000 a third of that.
# Until one has taught how long the GPU works, they come at twice as many.
FIRST_AT_STEP = 12
AGAIN, UNTIL_KNOWN = 4, 2
LEAD = 1.3
LONGEST_DELAY_S = 0.2


class Calibration:
    """The lead that is asked for or being used up, and when the next one comes."""

    def __init__(self) -> None:
        self.under_way = False
        self.asked = False
        self.again_delay_s = 0.0
        self._delay_s = 0.0
        self._from = Point.NONE
        self._at_step = FIRST_AT_STEP

    def due(self, steps: int) -> bool:
        """Whether a lead is to be asked for after so many steps."""
        return not self.asked and steps >= self._at_step

    def ask(self, steps: int, queueing_s: float, behind_s: float, syncs: float, work_known: bool) -> None:
        """Ask for a lead, unless the GPU is behind by as much as a step queues anyway."""
        self._at_step = steps * (AGAIN if work_known else UNTIL_KNOWN)
        if behind_s < queueing_s < LONGEST_DELAY_S / LEAD:
            # The driver's queue holds about a thousand kernels: every other time the lead is given for backward alone.
            self._from = Point.BATCH if self._from is not Point.BATCH else Point.BACKWARD
            self._delay_s = LEAD * queueing_s
            # Each blocking call of a step takes the lead away. Between two of them there is less to queue. Behind the
            # last one comes the optimizer, which may need a longer lead: that leaves some doubt (see gpu_time).
            self.again_delay_s = 2 * LEAD * queueing_s / (1 + syncs // steps)
            self.asked = True

    def begin(self, point: Point) -> float | None:
        """The training thread is at ``point``: the delay to queue there, if a lead was asked for from there on."""
        if not self.asked or self._from is not point:
            return None
        self.asked, self.under_way = False, True
        return self._delay_s
