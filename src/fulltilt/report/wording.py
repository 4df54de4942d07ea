"""Figures and names as people read them. Every surface of the report words them the same way."""

from __future__ import annotations

import re

from fulltilt.diagnosis.loaders import joined_lines
from fulltilt.figures import NOT_MEASURED, clean, one_line, percent, seconds, whole
from fulltilt.records import DeepRecord, HotLine, RankRecord, RunRecord

NO_END_YET = "This run has no end yet: it still runs, or it was killed. This is what there is so far."
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:%|×|ms\b|s\b|min\b|h\b|samples/s|steps\b|workers\b|CPUs\b))")


def ended(record: RunRecord) -> str:
    """How a run ended: ``done``, ``ended with exit code 1``, ``killed``."""
    if record.exit_code is not None and record.exit_code > 0:
        if record.state == "crashed":  # whether it crashed or chose to say so, nobody else knows
            return f"ended with exit code {record.exit_code}"
        return f"{record.state}, exit code {record.exit_code}"
    return f"{record.state}, {clean(record.ended_by)}" if record.ended_by else record.state


def after_startup(share: float) -> str:
    """``62 % of the time after start-up``: the base of every share but those of the ledger."""
    return f"{percent(share)} of the time after start-up"


def setting(value: str | int | float | bool | None) -> str:
    """A setting's value as Python writes it."""
    return NOT_MEASURED if value is None else str(value)


def decimals(whole_s: float) -> int:
    """How many decimals of a second a table needs whose figures add up to ``whole_s``."""
    return 1 if whole_s >= 100 else 2 if whole_s >= 10 else 3


def glued(text: str) -> str:
    """A sentence whose figures are not torn from their units at the end of a line."""
    return _BEFORE_UNIT.sub("\N{NO-BREAK SPACE}", text)


def deep_facts(deep: DeepRecord) -> list[tuple[str, str]]:
    """What the profiler saw in a step (``--deep N``), as names and figures."""
    return [
        ("steps looked at", whole(deep.steps)),
        ("step", seconds(deep.step_s)),
        ("GPU busy", seconds(deep.gpu_busy_s)),
        ("gaps between kernels", seconds(deep.kernel_gaps_s)),
        ("copies", seconds(deep.copies_s)),
        ("kernels", NOT_MEASURED if deep.kernels is None else whole(deep.kernels)),
        ("in tensor cores", percent(deep.tensor_core_share)),
        *([("the profiler failed", deep.error)] if deep.error else []),
    ]


def not_valid(because: str) -> str:
    """The warning above a run whose timings are not its own."""
    return f"Not a valid measurement: {one_line(because)}."


def worker_lines(rank: RankRecord) -> tuple[HotLine, ...]:
    """The lines that cost time where batches are fetched: inside the workers of all loaders, or without any."""
    return joined_lines(line for work in rank.workers for line in work.lines)


def fetching_title(rank: RankRecord) -> str:
    """What stands above ``worker_lines``: without workers the training process fetches by itself."""
    fetching = {work.loader_id for work in rank.workers if work.lines}
    staffed = any(loader.num_workers > 0 for loader in rank.loaders if loader.loader_id in fetching)
    return f"{'Inside the workers' if staffed else 'Inside the loading'}, share of fetching"
