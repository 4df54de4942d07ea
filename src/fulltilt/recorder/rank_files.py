"""The two files of one rank in the run folder, its spans and its record: how they are written and followed."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from dataclasses import replace
from functools import reduce
from pathlib import Path

import psutil

from fulltilt import store
from fulltilt.errors import ForeignFiles, RunFolderError
from fulltilt.records import BUCKETS, Buckets, RankRecord, Span

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
        """The stream of this rank, or the next free one when a living process has it already.

        In the folder of a task each process of a rank has files of its own: a restart may number the ranks differently.
        """
        owned = store.OwnedFolder.around(folder / store.RUN_FILE)
        if owned is None:
            raise RunFolderError(f"{folder} is not a run folder of Fulltilt's")
        in_task = store.is_task(folder)
        before = store.rank_parts(folder) if in_task else []
        for number in range(MOST_STREAMS):
            stream, part = (rank, number) if in_task else (rank + number, 0)
            if not _take(owned, store.claim_file(stream, part), of_the_dead=not in_task):
                continue
            # After a restart the new process continues at the end of the last process's spans.
            dead = [one for one in before if not psutil.pid_exists(_pid_of(folder, *one))] if in_task else [(stream, 0)]
            files = (folder / store.steps_file(*one) for one in dead)
            ends = [span.t1_s for file in files for span in [*store.read_lines(file, Span)][-1:]]
            writer = store.LineWriter(folder / store.steps_file(stream, part))
            return cls(folder, stream, writer, max(ends, default=0.0), part if in_task else None)
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
    """A span without the part before a moment, which was start-up that other processes have already booked."""
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


def _take(folder: store.OwnedFolder, name: str, of_the_dead: bool) -> bool:
    """Whether this process has got a stream: unclaimed, or claimed by itself, or else by one ``of_the_dead``."""
    for _ in range(2):
        with contextlib.suppress(ForeignFiles):
            descriptor = folder.create(name, 0o644)
            os.write(descriptor, str(os.getpid()).encode())
            os.close(descriptor)
            return True
        if not of_the_dead or not folder.owns(name):
            return False
        owner = (folder.path / name).read_text()  # empty while another process is just claiming it
        if owner == str(os.getpid()):
            return True
        if not owner.isdecimal() or psutil.pid_exists(int(owner)) or not folder.remove(name):
            return False
    return False


RECENT_S = 10.0
# A warning waits until this much training has been seen.
WARN_AFTER_S = 20.0


class SpanFollower:
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

    def read(self) -> None:
        """Take in what was written since the last call."""
        if not self._offset and not self._steps.exists() and (ranks := store.rank_parts(self._folder)):
            self._steps = self._folder / store.steps_file(*ranks[0])
            self._rank = self._folder / store.rank_file(*ranks[0])
        spans, self._offset = store.read_new_lines(self._steps, Span, self._offset)
        self.steps += sum(span.steps for span in spans)
        self._recent.extend(spans)
        while len(self._recent) > 2 and self._recent[-1].t1_s - self._recent[1].t0_s > WARN_AFTER_S:
            self._recent.popleft()
        if spans and self._rank.exists():
            self._record = store.read_record(self._rank, RankRecord)

    def recent_buckets(self, last_s: float) -> Buckets:
        """Where the time of the last seconds of training went."""
        return reduce(Buckets.plus, (span.buckets for span in self._since(last_s)), Buckets())

    def words(self) -> str:
        """The job's progress, in a few words."""
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
