"""Which processes of a job are its ranks: one that a rank starts to train on the side is part of that rank."""

from __future__ import annotations

from dataclasses import replace

from fulltilt.records import RankRecord, Run, Span


def without_side_jobs(run: Run) -> Run:
    """The run without processes that a rank started, trained on their own account, and outlived.

    A probe on frozen weights, or a search, takes the time of the rank that waits for it, and its steps are not the
    job's. A script that trains a little before it starts its ranks does not train while they do: they stay.
    """
    streams = list(zip(run.ranks, run.spans, strict=True))
    kept = [stream for stream in streams if not any(_is_beside(stream, other) for other in streams)]
    if len(kept) == len(streams):
        return run
    return replace(run, ranks=tuple(rank for rank, _ in kept), spans=tuple(spans for _, spans in kept))


def _is_beside(child: tuple[RankRecord, tuple[Span, ...]], parent: tuple[RankRecord, tuple[Span, ...]]) -> bool:
    (rank, spans), (above, spans_above) = child, parent
    if rank.world_size != 1 or rank.parent_pid != above.pid or rank.hostname != above.hostname:
        return False
    began_s = min((span.t0_s for span in spans if span.steps), default=float("inf"))
    return any(span.steps and span.t1_s > began_s for span in spans_above)
