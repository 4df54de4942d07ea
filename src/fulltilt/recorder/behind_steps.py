"""Whose work it is that follows an optimizer's step: the script's own, or the next forward pass. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from fulltilt.recorder.marks import Activity


@dataclass
class BehindSteps:
    """How long the user's code runs between an optimizer's step and what comes next, and how often that is a batch.

    Where a batch is drawn next, there is no forward pass in between: what torch does there (averaged weights, metrics)
    is the script's own. A GAN's other network, a closure, or a loop without a loader goes on with a forward pass.
    """

    to_batch_ns: float = 0.0
    to_backward_ns: float = 0.0

    def ended(self, ns: float, by: Activity) -> None:
        """Such a stretch is over. One that a save or a collective ends says nothing."""
        if by in (Activity.NEXT, Activity.ITER):
            self.to_batch_ns += ns
        elif by is Activity.BACKWARD:
            self.to_backward_ns += ns

    def is_the_scripts_own(self, in_model_share: float) -> bool:
        """Whether torch's work outside of any model is mostly the script's own.

        ``in_model_share`` of all these stretches was seen inside a model: that part led to a backward.
        """
        all_ns = self.to_batch_ns + self.to_backward_ns
        return all_ns > 0 and self.to_batch_ns >= (1 - in_model_share) * all_ns / 2
