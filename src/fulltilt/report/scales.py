"""Round figures for the axes of charts."""

from __future__ import annotations

import math

MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86400
TICKS_S: tuple[float, ...] = (
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30),
    *(MINUTE_S * n for n in (1, 2, 5, 10, 15, 30)),
    *(HOUR_S * n for n in (1, 2, 3, 6, 12)),
    *(DAY_S * n for n in (1, 2, 5, 10)),
)


def nice_top(highest: float) -> float:
    """The next round figure whose half is round too."""
    if highest <= 0 or not math.isfinite(highest):
        return 1.0
    magnitude = 10.0 ** math.floor(math.log10(highest))
    return next(step * magnitude for step in (1, 2, 3, 4, 5, 6, 8, 10, 20) if step * magnitude >= highest * 0.9999)


def time_ticks(wall_s: float, most: int = 6) -> list[tuple[float, str]]:
    """At most ``most`` round moments of a run, with their labels."""
    step_s = next((tick for tick in TICKS_S if wall_s / tick < most), wall_s)
    count = int(wall_s / step_s + 1e-9)
    return [(i * step_s, _moment(i * step_s, step_s)) for i in range(count + 1)]


def tick_label(value: float) -> str:
    """A figure of an axis: as short as it can be."""
    for limit, unit in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if value >= limit:
            return f"{value / (limit if unit != ' k' else 1e3):g}{unit}"
    return f"{float(f'{value:.3g}'):g}"


def _moment(t_s: float, step_s: float) -> str:
    if t_s == 0:
        return "0"
    for unit_s, unit in ((DAY_S, "d"), (HOUR_S, "h"), (MINUTE_S, "min"), (1, "s")):
        if step_s >= unit_s:
            return f"{round(t_s / unit_s, 2):g} {unit}"
    return f"{t_s * 1000:.0f} ms"
