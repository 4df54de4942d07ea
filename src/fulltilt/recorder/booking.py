"""From tiles to the spans of a run folder: times since its start, and the user's own time as the looks divide it."""

from __future__ import annotations

from fulltilt.recorder.attribution import attribute
from fulltilt.recorder.looks import Looks
from fulltilt.recorder.notes import RankNotes
from fulltilt.recorder.rest import Usual
from fulltilt.recorder.spans import WarmUp
from fulltilt.recorder.tile import Tile
from fulltilt.records import Span

NS = 1e-9


class Booking:
    """Books tiles in order; the first spans are held back until warming up is told apart."""

    def __init__(self, t0_ns: int, notes: RankNotes, looks: Looks) -> None:
        self._t0_ns = t0_ns
        self._notes = notes
        self._looks = looks
        self._usual = Usual()
        self._warm_up = WarmUp()
        self._ready: list[Span] = []
        # Of the first step, until it is known how much of it was warming up: launching, and the GPU's work.
        self._first: tuple[float, float] | None = None

    def book(self, tiles: list[Tile]) -> None:
        """Make spans of these tiles, which are taken out of the list."""
        if not tiles:
            return
        notes = self._notes
        seen, seen_apart = self._looks.splits()
        in_backward = self._looks.backward.split()
        exposed_s = notes.exposed_communication_s()
        for tile in tiles:
            # What follows the last step is no step: it divides as what takes long.
            here = seen if tile.steps else seen_apart
            attributed = attribute(tile, here, seen_apart, self._usual, exposed_s, in_backward)
            notes.launch_s += attributed.launch_s
            busy_s = attributed.buckets.compute_s if tile.gpu and tile.steps else 0.0
            notes.gpu_busy_s += busy_s
            notes.gpu_steps += tile.steps if tile.gpu else 0
            if tile.steps and not notes.steps_attributed:
                self._first = attributed.launch_s, busy_s
            span = Span(
                t0_s=self._since_start_s(tile.t0_ns),
                t1_s=self._since_start_s(tile.t1_ns),
                first_step=notes.steps_attributed,
                steps=tile.steps,
                batches=tile.batches,
                samples=tile.samples,
                buckets=attributed.buckets,
                epoch=tile.epoch,
                skipped_steps=tile.skipped,
                step_max_s=tile.step_max_ns * NS if tile.steps else None,
                data_wait_max_s=tile.data_wait_max_ns * NS,
                phases=attributed.phases if tile.steps else None,
            )
            notes.steps_attributed += tile.steps
            self._ready.extend(self._warm_up.add(span))
        self._leave_out_warm_up()
        tiles.clear()
        self._looks.begin_window()

    def take(self, final: bool) -> list[Span]:
        """The spans that can be written now; with ``final`` all there are."""
        if final:
            self._ready.extend(self._warm_up.release())
            self._leave_out_warm_up()
        ready, self._ready = self._ready, []
        return ready

    def under_way(self, tile: Tile, steps: int) -> Span:
        """The step under way, behind ``steps`` others: all that is known of it if the job is killed."""
        _, seen_apart = self._looks.splits()
        buckets = attribute(tile, seen_apart, seen_apart, Usual(), 0.0, self._looks.backward.split()).buckets
        t0_s, t1_s = self._since_start_s(tile.t0_ns), self._since_start_s(tile.t1_ns)
        return Span(t0_s, t1_s, steps, 0, 0, None, buckets, tile.epoch)

    def _leave_out_warm_up(self) -> None:
        """What was warming up is neither launching nor work that the next steps have, too."""
        kept = self._warm_up.kept
        if kept is None or self._first is None:
            return
        launch_s, busy_s = self._first
        self._first = None
        self._notes.launch_s -= (1 - kept) * launch_s
        self._notes.gpu_busy_s -= (1 - kept) * busy_s

    def _since_start_s(self, t_ns: float) -> float:
        return (t_ns - self._t0_ns) * NS
