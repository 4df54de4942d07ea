"""Following a run while it is recorded: rank 0's spans as they are written, and where its last seconds went."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from fulltilt import store
from fulltilt.records import Buckets, LoaderRecord, RankRecord, Span

RECENT_S = 10.0
# A warning waits until this much training has been seen.
WARN_AFTER_S = 20.0


class Following:
    """Follows rank 0's spans as they are written."""

    def __init__(self, folder: Path) -> None:
        self._steps = folder / store.steps_file(0)
        self._rank = folder / store.rank_file(0)
        self._offset = 0
        self._recent: deque[Span] = deque()
        self._record: RankRecord | None = None
        self.steps = 0

    @property
    def on_gpu(self) -> bool:
        """Whether the job trains on a GPU."""
        return self._record is not None and self._record.device != "cpu"

    @property
    def loaders(self) -> tuple[LoaderRecord, ...]:
        """The job's loaders so far."""
        return self._record.loaders if self._record is not None else ()

    def read(self) -> None:
        """Take in what was written since the last call."""
        spans, self._offset = store.read_new_lines(self._steps, Span, self._offset)
        for span in spans:
            self.steps += span.steps
            self._recent.append(span)
        while len(self._recent) > 2 and self._recent[-1].t1_s - self._recent[1].t0_s > WARN_AFTER_S:
            self._recent.popleft()
        if spans and self._rank.exists():
            self._record = store.read_record(self._rank, RankRecord)

    def recent_buckets(self, last_s: float) -> Buckets:
        """Where the time of the last seconds of training went."""
        total = Buckets()
        for span in self._since(last_s):
            total = total.plus(span.buckets)
        return total

    def words(self) -> str:
        """How the job fares, in a few words."""
        spans = [span for span in self._since(RECENT_S) if span.steps]
        if not spans:
            return "waiting for the first step" if not self.steps else f"step {self.steps:,}"
        took_s = sum(span.t1_s - span.t0_s - span.buckets.startup_s for span in spans)
        if took_s <= 0:
            return f"step {self.steps:,}"
        samples = [span.samples for span in spans if span.samples is not None]
        steps = sum(span.steps for span in spans)
        rate = f"{sum(samples) / took_s:,.0f} samples/s" if samples else f"{steps / took_s:,.1f} steps/s"
        waited = sum(span.buckets.data_wait_s for span in spans) / took_s
        return f"step {self.steps:,} · {rate} · data wait {100 * waited:.0f} %"

    def _since(self, last_s: float) -> list[Span]:
        if not self._recent:
            return []
        end = self._recent[-1].t1_s
        return [span for span in self._recent if span.t1_s > end - last_s]
