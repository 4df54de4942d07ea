"""Copies from the host to the GPU, added up."""

from __future__ import annotations

from dataclasses import dataclass, field

from fulltilt.recorder.lines import LineTimes
from fulltilt.records import TransferRecord


@dataclass
class Copies:
    """Host-to-GPU copies of the training thread."""

    copies: float = 0.0
    bytes: float = 0.0
    blocked_s: float = 0.0
    asked: int = 0
    pageable: int = 0
    blocking: float = 0.0
    lines: LineTimes = field(default_factory=LineTimes)

    def add(self, copied_bytes: int, took_s: float, blocking: bool, stands_for: float) -> None:
        """A copy, which stands for so many like it."""
        self.copies += stands_for
        self.bytes += stands_for * copied_bytes
        self.blocked_s += stands_for * took_s
        self.blocking += stands_for * blocking

    def record(self, stretch: float) -> TransferRecord | None:
        """The copies as a record, stretched to the whole run; None when there were none."""
        if not self.copies:
            return None
        top = self.lines.top(1)
        return TransferRecord(
            copies=round(stretch * self.copies),
            bytes=round(stretch * self.bytes),
            blocked_s=stretch * self.blocked_s,
            pageable_share=self.pageable / self.asked if self.asked else None,
            blocking_share=self.blocking / self.copies,
            where=top[0].where if top else None,
        )
