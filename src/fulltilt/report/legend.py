"""One colour and one name for each thing that is drawn, the same in the terminal and on the page.

The colours were chosen together so that they stay apart under the three kinds of colour blindness and stand out
against a white as well as a near-black ground (at least 3 : 1). Colour never carries a meaning alone: each drawing
also names its parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from fulltilt.records import BUCKETS, Ledger


@dataclass(frozen=True, slots=True)
class Tint:
    """How one bucket or phase is shown: its name, its colour as ``#rrggbb``, and what a bucket stands for.

    ``pattern`` tells a bucket from the others on a console without colours, and maybe without block characters.
    """

    label: str
    colour: str
    meaning: str = ""
    pattern: str = "█"

    @property
    def ink(self) -> str:
        """The colour in which text on it reads best: white or near-black."""
        return "#ffffff" if self.colour in _DARK else "#111111"


_COMPUTE = "#2b6cd4"
_DATA = "#d96a0b"
_TRANSFER = "#7a5c92"
_HOST = "#b34038"
_PREPROCESS, _VALIDATION, _OPTIMIZER = "#a8520a", "#0e775c", "#2453a6"
_DARK = (_COMPUTE, _TRANSFER, _HOST, _PREPROCESS, _VALIDATION, _OPTIMIZER)
IDLE = "idle"

BUCKET_TINTS: dict[str, Tint] = {
    "startup_s": Tint("start-up", "#80868f", "imports, data sets and models being built", ":"),
    "data_wait_s": Tint("data wait", _DATA, "the training loop stands still until a batch arrives", "░"),
    "transfer_s": Tint("transfer", _TRANSFER, "copies to the GPU that hold it up", ">"),
    "compute_s": Tint("compute", _COMPUTE, "forward, backward and optimizer: what the machine is there for"),
    "sync_s": Tint("sync", "#d86bba", "the host waits for the GPU, and the GPU then waits for the host", "|"),
    "host_code_s": Tint("host code", _HOST, "Python of the training script, while nothing computes", "▒"),
    "validation_s": Tint("validation", _VALIDATION, "evaluation inside the run", "▓"),
    "checkpoint_s": Tint("checkpoint", "#2e9ada", "saving the model while training stands still", "&"),
    "epoch_turnover_s": Tint("epoch turn-over", "#759c66", "workers stop and start between epochs", "~"),
    "communication_s": Tint("communication", "#687bf9", "gradient exchange that computing does not hide", "%"),
    "unattributed_s": Tint("unattributed", "#80868f", "time that could not be told apart", "?"),
}

PHASE_TINTS: dict[str, Tint] = {
    "load": Tint("load", _DATA),
    "preprocess": Tint("preprocess", _PREPROCESS),
    "queue": Tint("wait for a CPU", "#80868f"),
    "wait": Tint("wait for data", _DATA),
    "transfer": Tint("transfer", _TRANSFER),
    "forward": Tint("forward", "#5b8fe6"),
    "backward": Tint("backward", _COMPUTE),
    "optimizer": Tint("optimizer", _OPTIMIZER),
    "other": Tint("other code", _HOST),
    "busy": Tint("kernels, gaps", _COMPUTE),
    "kernels": Tint("kernels", _COMPUTE),
    "gaps": Tint("gaps", "#759c66"),
    IDLE: Tint("idle", "#80868f"),
}


def bucket_order(ledger: Ledger) -> list[str]:
    """The buckets that occur, the largest first: the order of every bar. Empty for a run that took no time."""
    if ledger.wall_s <= 0:
        return []
    names = [name for name in BUCKETS if getattr(ledger.buckets, name) > 0]
    return sorted(names, key=lambda name: -getattr(ledger.buckets, name))
