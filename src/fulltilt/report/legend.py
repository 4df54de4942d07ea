"""The name and colour of each bucket and phase, the same in the terminal and on the page.

The colours were chosen together so that they differ under the three kinds of colour blindness and have a contrast of
at least 3 : 1 against white and near-black. Colour never carries a meaning alone: drawings also name their parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from fulltilt.records import BUCKETS, Ledger


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """How a bucket or phase is shown: its name, its colour as ``#rrggbb``, and what a bucket means.

    ``pattern`` is drawn on a console without colours.
    """

    label: str
    colour: str
    meaning: str = ""
    pattern: str = "█"

    @property
    def ink(self) -> str:
        """The text colour with the best contrast on it: white or near-black."""
        return "#ffffff" if self.colour in _DARK else "#111111"


_COMPUTE = "#2b6cd4"
_DATA = "#d96a0b"
_TRANSFER = "#7a5c92"
_HOST = "#b34038"
_PREPROCESS, _VALIDATION, _OPTIMIZER = "#a8520a", "#0e775c", "#2453a6"
_DARK = (_COMPUTE, _TRANSFER, _HOST, _PREPROCESS, _VALIDATION, _OPTIMIZER)
IDLE = "idle"

BUCKET_LEGEND: dict[str, LegendEntry] = {
    "startup_s": LegendEntry("start-up", "#80868f", "imports, building data sets and models", ":"),
    "data_wait_s": LegendEntry("data wait", _DATA, "the training loop waits for a batch", "░"),
    "transfer_s": LegendEntry("transfer", _TRANSFER, "the GPU waits for copies to it", ">"),
    "compute_s": LegendEntry("compute", _COMPUTE, "forward, backward and optimizer"),
    "sync_s": LegendEntry("sync", "#d86bba", "the host waits for the GPU, and the GPU then waits for the host", "|"),
    "host_code_s": LegendEntry("host code", _HOST, "Python of the training script while nothing computes", "▒"),
    "validation_s": LegendEntry("validation", _VALIDATION, "evaluation inside the run", "▓"),
    "checkpoint_s": LegendEntry("checkpoint", "#2e9ada", "training waits while the model is saved", "&"),
    "epoch_turnover_s": LegendEntry("epoch restart", "#759c66", "workers stop and start between epochs", "~"),
    "communication_s": LegendEntry(
        "communication", "#687bf9", "gradient exchange that does not overlap with computing", "%"
    ),
    "unattributed_s": LegendEntry("unattributed", "#80868f", "time without a known cause", "?"),
}

PHASE_LEGEND: dict[str, LegendEntry] = {
    "load": LegendEntry("load", _DATA),
    "preprocess": LegendEntry("preprocess", _PREPROCESS),
    "queue": LegendEntry("wait for a CPU", "#80868f"),
    "data_wait": LegendEntry("data wait", _DATA),
    "transfer": LegendEntry("transfer", _TRANSFER),
    "forward": LegendEntry("forward", "#5b8fe6"),
    "backward": LegendEntry("backward", _COMPUTE),
    "optimizer": LegendEntry("optimizer", _OPTIMIZER),
    "other": LegendEntry("other code", _HOST),
    "busy": LegendEntry("kernels, gaps", _COMPUTE),
    "kernels": LegendEntry("kernels", _COMPUTE),
    "gaps": LegendEntry("gaps", "#759c66"),
    IDLE: LegendEntry("idle", "#80868f"),
}


def bucket_order(ledger: Ledger) -> list[str]:
    """The buckets of the ledger that are not empty, the largest first."""
    if ledger.wall_s <= 0:
        return []
    names = [name for name in BUCKETS if getattr(ledger.buckets, name) > 0]
    return sorted(names, key=lambda name: -getattr(ledger.buckets, name))
