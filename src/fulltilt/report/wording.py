"""Figures and names as people read them. Every surface of the report words them the same way."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from fulltilt.records import DeepRecord, RunRecord

TITLES: dict[str, str] = {
    "input_serial": "Loading happens in the training process",
    "input_cpu_bound": "The loader's workers are short of CPU",
    "input_io_bound": "The loader's workers wait, they do not compute",
    "input_handover": "Batches reach the training late",
    "epoch_restart": "Workers start anew each epoch",
    "transfer_blocking": "Copies to the GPU block",
    "sync_point": "A line makes the host wait for the GPU",
    "launch_bound": "The host cannot launch kernels fast enough",
    "batch_too_small": "The batch is too small for the GPU",
    "precision_unused": "Tensor cores lie idle",
    "padding_waste": "Padding is computed in vain",
    "host_code": "Python between the steps holds training up",
    "validation_heavy": "Validation takes a large share",
    "checkpoint_stall": "Saving stops the training",
    "memory_pressure": "Memory is short",
    "cpu_oversubscribed": "More threads than CPUs",
    "shm_small": "Shared memory is too small",
    "throttled": "The GPU is slowed down",
    "gpu_shared": "Another process uses the GPU",
    "straggler": "One rank holds the others up",
    "communication_bound": "Gradient exchange limits the job",
    "compute_bound": "The job runs at its compute ceiling",
    "no_steps": "Nothing was trained",
    "too_short": "Too short to tell",
    "unexplained": "No cause found",
}

NOT_MEASURED = "–"
NO_END_YET = "This run has no end yet: it still runs, or it was killed. This is what there is so far."
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:%|×|ms\b|s\b|min\b|h\b|samples/s|steps\b|workers\b|CPUs\b))")


def title(code: str) -> str:
    """A finding's code as a short sentence."""
    return TITLES.get(code, code)


def ended(record: RunRecord) -> str:
    """How a run ended: ``done``, ``ended with exit code 1``, ``killed``."""
    if record.exit_code is not None and record.exit_code > 0:
        if record.state == "crashed":  # whether it crashed or chose to say so, nobody else knows
            return f"ended with exit code {record.exit_code}"
        return f"{record.state}, exit code {record.exit_code}"
    return f"{record.state}, {clean(record.ended_by)}" if record.ended_by else record.state


def setting(value: str | int | float | bool | None) -> str:
    """A setting's value as Python writes it."""
    return NOT_MEASURED if value is None else str(value)


def seconds(value: float | None) -> str:
    """A duration with the unit that suits it: ``0.31 ms``, ``486 ms``, ``14.4 s``, ``4 min 11 s``, ``3 h 12 min``."""
    if value is None:
        return NOT_MEASURED
    if value < 0.9995:
        return f"{_three_figures(value * 1000)} ms"
    if value < 59.95:
        return f"{value:.2f} s" if value < 9.995 else f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def decimals(whole_s: float) -> int:
    """How many decimals of a second a table needs whose figures add up to ``whole_s``."""
    return 1 if whole_s >= 100 else 2 if whole_s >= 10 else 3


def share(value: float | None) -> str:
    """A fraction of one in per cent, with a decimal where it is small."""
    if value is None:
        return NOT_MEASURED
    percent = value * 100
    if 0 < percent < 0.05:
        return "< 0.1 %"
    return f"{percent:.1f} %" if percent < 9.95 else f"{percent:.0f} %"


def percent(value: float | None) -> str:
    """A figure that is already in per cent."""
    return NOT_MEASURED if value is None else f"{value:.0f} %"


def percent_range(values: Sequence[float | None]) -> str:
    """Several figures in per cent, from the lowest to the highest."""
    known = [value for value in values if value is not None]
    if not known:
        return NOT_MEASURED
    low, high = f"{min(known):.0f}", f"{max(known):.0f}"
    return f"{low} %" if low == high else f"{low} to {high} %"


def number(value: float | None) -> str:
    """A count or rate in three figures or so: ``2.06``, ``132``, ``15.2 k``, ``3.19 M``."""
    if value is None:
        return NOT_MEASURED
    for limit, unit in ((999_500_000, "G"), (999_500, "M"), (9_999.5, "k")):
        if value >= limit:
            return f"{_three_figures(value / {'G': 1e9, 'M': 1e6, 'k': 1e3}[unit])} {unit}"
    return f"{value:.0f}" if value >= 1000 else _three_figures(value)


def count(value: int) -> str:
    """A whole number, exactly."""
    return f"{value:,}".replace(",", " ")


def size(value: float | None) -> str:
    """Bytes in the binary unit that suits them."""
    if value is None:
        return NOT_MEASURED
    for limit, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= limit:
            return f"{value / limit:.1f} {unit}"
    return f"{value:.0f} B"


def power(value: float | None) -> str:
    """Watts."""
    return NOT_MEASURED if value is None else f"{value:.0f} W"


def temperature(value: float | None) -> str:
    """Degrees Celsius."""
    return NOT_MEASURED if value is None else f"{value:.0f} °C"


def speedup(predicted: tuple[float, float] | None) -> str | None:
    """A predicted gain as a range: ``2.6 to 3.1 × as fast``."""
    if predicted is None:
        return None
    low, high = (f"{value:.2f}" if value < 1.1 else f"{value:.1f}" for value in predicted)
    return f"{low} × as fast" if low == high else f"{low} to {high} × as fast"


def glued(text: str) -> str:
    """A sentence whose figures are not torn from their units at the end of a line."""
    return _BEFORE_UNIT.sub("\N{NO-BREAK SPACE}", text)


def deep_facts(deep: DeepRecord) -> list[tuple[str, str]]:
    """What the profiler saw in a step (``--deep N``), as names and figures."""
    return [
        ("steps looked at", count(deep.steps)),
        ("step", seconds(deep.step_s)),
        ("GPU busy", seconds(deep.gpu_busy_s)),
        ("gaps between kernels", seconds(deep.kernel_gaps_s)),
        ("copies", seconds(deep.copies_s)),
        ("kernels", NOT_MEASURED if deep.kernels is None else count(deep.kernels)),
        ("in tensor cores", share(deep.tensor_core_share)),
        *([("the profiler failed", deep.error)] if deep.error else []),
    ]


def not_valid(because: str) -> str:
    """The warning above a run whose timings are not its own."""
    return f"Not a valid measurement: {one_line(because)}."


def one_line(text: str) -> str:
    """Text that is safe to show, on one line."""
    return clean(" ".join(text.split()))


def brief(text: str, most: int) -> str:
    """Code on one line, cut where it is longer than ``most`` characters."""
    line = one_line(text)
    return line if len(line) <= most else line[: most - 1] + "…"


def clean(text: str) -> str:
    """Text that is safe to show: control codes, text-direction overrides and undecodable bytes made visible."""
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    if character.isprintable() or character in "\n\N{NO-BREAK SPACE}":
        return character
    if character == "\t":
        return " "
    # Cc: control codes, Cf: invisible marks such as direction overrides, Cs: bytes of a name that are not UTF-8.
    return "\N{REPLACEMENT CHARACTER}" if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn") else " "


def _three_figures(value: float) -> str:
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
