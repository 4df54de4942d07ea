"""The two files that one rank writes into the run folder, its spans and its record, and how they are followed."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from dataclasses import replace
from pathlib import Path

import psutil

from fulltilt import store
from fulltilt.errors import ForeignFiles, RunFolderError
from fulltilt.records import BUCKETS, Buckets, LoaderRecord, RankRecord, Span

MOST_STREAMS = 4096


class RankFiles:
    """One stream of a run folder. Several processes may claim the same rank (a restart, two jobs in one script)."""

    def __init__(
        self, folder: Path, stream: int, writer: store.LineWriter, resumes_at_s: float, part: int | None = None
    ) -> None:
        self.stream = stream
        self._record = folder / store.rank_file(stream, part or 0)
        self._part = part
        self._writer = writer
        self._resumes_at_s = resumes_at_s

    @classmethod
    def claim(cls, folder: Path, rank: int) -> RankFiles:
        """The stream of this rank, or the next free one when a living process has it already."""
        owned = store.OwnedFolder.around(folder / store.RUN_FILE)
        if owned is None:
            raise RunFolderError(f"{folder} is not a run folder of Fulltilt's")
        if store.is_task(folder):
            return cls._claim_part(owned, rank)
        for stream in range(rank, rank + MOST_STREAMS):
            if _take(owned, store.claim_file(stream)):
                path = folder / store.steps_file(stream)
                # After an elastic restart the new process goes on where the dead one's spans end.
                ends = [span.t1_s for span in store.read_lines(path, Span)]
                return cls(folder, stream, store.LineWriter(path), ends[-1] if ends else 0.0)
        raise RunFolderError(f"{folder} has no free stream for rank {rank}")

    @classmethod
    def _claim_part(cls, owned: store.OwnedFolder, rank: int) -> RankFiles:
        """In the folder of a task each process has files of its own: after a restart ranks may be numbered anew."""
        folder = owned.path
        before = store.rank_parts(folder)
        ends = [0.0]
        for part in range(MOST_STREAMS):
            with contextlib.suppress(ForeignFiles):
                os.close(owned.create(store.claim_file(rank, part), 0o644))
                # Ranks of before this restart may have had other numbers. Its time begins where theirs ends.
                for dead in (r for r in before if not psutil.pid_exists(_pid_of(folder, *r))):
                    ends += [span.t1_s for span in store.read_lines(folder / store.steps_file(*dead), Span)][-1:]
                return cls(folder, rank, store.LineWriter(folder / store.steps_file(rank, part)), max(ends), part)
        raise RunFolderError(f"{folder} has no free place for rank {rank}")

    def write(self, spans: list[Span]) -> None:
        """Append spans."""
        if self._resumes_at_s and spans:
            spans = [trimmed for span in spans if (trimmed := cut_before(span, self._resumes_at_s)) is not None]
        self._writer.write(spans)

    def write_record(self, record: RankRecord) -> None:
        """Replace the record."""
        if self._part is not None:
            record = replace(record, t0_s=self._resumes_at_s)
        store.write_json(self._record, record, again=not record.finished)

    def close(self) -> None:
        """No more spans come."""
        self._writer.close()


def cut_before(span: Span, moment_s: float) -> Span | None:
    """A span without the part before a moment: that part was start-up in a time that others have booked already."""
    if span.t1_s <= moment_s:
        return None
    if span.t0_s >= moment_s:
        return span
    excess = moment_s - span.t0_s
    plain = {name: getattr(span.buckets, name) for name in BUCKETS}
    plain["startup_s"] -= excess
    if plain["startup_s"] < 0:
        return replace(span, t0_s=moment_s, buckets=Buckets(unattributed_s=span.t1_s - moment_s))
    return replace(span, t0_s=moment_s, buckets=Buckets(**plain))


def _pid_of(folder: Path, rank: int, part: int) -> int:
    return store.read_record(folder / store.rank_file(rank, part), RankRecord).pid


def _take(folder: store.OwnedFolder, name: str) -> bool:
    """Whether this process now has a stream: its claim is ours, new, or of a process that is gone."""
    for _ in range(2):
        try:
            descriptor = folder.create(name, 0o644)
        except ForeignFiles:
            if not folder.owns(name):
                return False
            owner = (folder.path / name).read_text()  # empty: another process is just claiming it
            if owner == str(os.getpid()):
                return True
            if not owner.isdecimal() or psutil.pid_exists(int(owner)) or not folder.remove(name):
                return False
            continue
        os.write(descriptor, str(os.getpid()).encode())
        os.close(descriptor)
        return True
    return False


RECENT_S = 10.0
# A warning waits until this much training has been seen.
WARN_AFTER_S = 20.0


class Following:
    """Follows the spans of the folder's first rank as they are written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
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
        if not self._offset and not self._steps.exists() and (ranks := store.rank_parts(self._folder)):
            self._steps, self._rank = (
                self._folder / store.steps_file(*ranks[0]),
                self._folder / store.rank_file(*ranks[0]),
            )
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
