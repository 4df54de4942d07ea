"""The settings in force, as the answer lists them."""

from __future__ import annotations

from dataclasses import fields

from fulltilt.diagnosis.evidence import Evidence
from fulltilt.diagnosis.live import live_record, live_settings
from fulltilt.records import PrecisionRecord

Setting = tuple[str, str | int | float | bool | None]


def settings_in_force(evidence: Evidence) -> tuple[Setting, ...]:
    """What the job ran with, what was asked for (``asked.…``), what live tuning did (``live.…``). None: not seen."""
    rank, loader = evidence.rank, evidence.loader
    in_force: list[Setting] = [
        ("device", rank.device if rank else None),
        ("world_size", rank.world_size if rank else None),
        ("batch_size", loader.batch_size if loader else None),
        ("accumulation", _accumulation(evidence)),
        ("num_workers", loader.num_workers if loader else None),
        ("prefetch_factor", loader.prefetch_factor if loader else None),
        ("pin_memory", loader.pin_memory if loader else None),
        ("persistent_workers", loader.persistent_workers if loader else None),
        ("start_method", loader.start_method if loader else None),
        ("torch_threads", rank.torch_threads if rank else None),
        ("precision", precision_name(rank.precision) if rank and rank.precision else None),
        ("tf32", rank.precision.tf32 if rank and rank.precision else None),
        ("compile", rank.precision.compiled if rank and rank.precision else None),
        ("optimizer", ", ".join(rank.optimizers) or None if rank else None),
        ("learning_rate", rank.learning_rate if rank else None),
        ("loader", loader.where if loader else None),
    ]
    asked = evidence.run.run.asked
    values = ((field.name, getattr(asked, field.name)) for field in fields(asked))
    asked_for = ((f"asked.{name}", value) for name, value in values if value is not None)
    return (*in_force, *asked_for, *live_settings(live_record(rank, loader)))


def precision_name(precision: PrecisionRecord) -> str | None:
    """``bfloat16`` under autocast, otherwise the type of the parameters."""
    return precision.autocast or precision.parameters


def _accumulation(evidence: Evidence) -> int | None:
    """Batches for each optimizer step, as counted."""
    batches = sum(span.batches for spans in evidence.run.spans for span in spans if span.steps > 0)
    steps = sum(span.steps for spans in evidence.run.spans for span in spans)
    return max(round(batches / steps), 1) if batches and steps else None
