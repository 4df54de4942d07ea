"""When the state of a run is frozen and handed to the writer, on all ranks together."""

from __future__ import annotations

from fulltilt.errors import Diverged
from fulltilt.train import state
from fulltilt.train.checkpoint import Snapshot
from fulltilt.train.rig import Rig
from fulltilt.train.watchdog import Watchdog
from fulltilt.train.writer import HostMemory


class Saving:
    """The saves of one run. All ranks call all of this together; the first one writes."""

    def __init__(self, rig: Rig, watchdog: Watchdog) -> None:
        self._rig, self._watchdog = rig, watchdog
        self._memory = HostMemory()
        self._saved_at: tuple[int, int] | None = self._here() if rig.progress.step else None

    @property
    def up_to_date(self) -> bool:
        """The present state is saved already, or is being written."""
        return self._saved_at == self._here()

    def save(self, metric: float | None = None, *, background: bool = True) -> None:
        """Save the present state unless it is saved; a ``metric`` is always worth a save."""
        self.wait_for_disk()
        if self.up_to_date and metric is None:
            return
        snapshot = self.freeze(metric)
        if snapshot is not None:
            self._rig.writer.save(snapshot, background=background)
        self._saved_at = self._here()

    def freeze(self, metric: float | None = None) -> Snapshot | None:
        """The state as it is now, for the writer; None on the other ranks.

        Raises Diverged rather than keep weights that nothing can be trained from: the checkpoint before is better.
        """
        rig = self._rig
        broken = rig.broken_weights()
        if rig.group.agree([broken is not None])[0]:
            what = f"the weights are no longer finite at step {rig.progress.step}: {broken or 'on another rank'}"
            raise Diverged(what, "Lower lr, set clip_norm, or train in a wider precision.")
        self.wait_for_disk()  # what is being written lies in the memory that is used now
        self._watchdog.beat(f"saving step {rig.progress.step}")
        rig.share_buffers()
        states = {name: part.state_dict() for name, part in rig.parts().items()}
        if rig.group.first:
            return state.freeze(rig.model, states, rig.progress, metric, self._memory)
        if rig.stepper.placement.lockstep:
            state.help_freeze(rig.model, states)
        return None

    def wait_for_disk(self) -> None:
        """Wait until everything saved is on the disk. Raises what the writer met."""
        self._watchdog.beat("waiting for the disk")
        self._rig.writer.wait()

    def _here(self) -> tuple[int, int]:
        return self._rig.progress.step, self._rig.progress.epoch
