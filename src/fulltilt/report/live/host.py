"""The host on the watch screen: CPU over time and by core, memory, disk reads."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from fulltilt.figures import size, used_of
from fulltilt.report.blocks import bar, cells, chart_rows
from fulltilt.report.live.parts import HEAD, LABEL_WIDTH, WatchView, label_text, series, spread

CPU, RAM, DISK = "#d96a0b", "#b5596a", "#5f8f4e"


def host_block(view: WatchView, width: int, rows: int) -> list[Text]:
    """The host, with a chart of its CPU use of ``rows`` lines."""
    host, past = view.now.host, [sample.host for sample in view.samples]
    facts = []
    if host.cpu_per_core_pct is not None:
        facts.append(f"{len(host.cpu_per_core_pct)} CPUs")
    if host.load_1min is not None:
        facts.append(f"load {host.load_1min:.1f}")
    if host.iowait_pct is not None:
        facts.append(f"I/O wait {host.iowait_pct:.0f} %")
    use = [reading.cpu_pct for reading in past]
    lines = [spread(Text("host", HEAD), Text("  ".join(facts)), width)]
    lines += series("CPU", use, CPU, width, rows, view.blocks)
    lines += core_lines(host.cpu_per_core_pct or (), width, view.blocks)
    lines.append(_ram_line(view, width))
    read = [reading.disk_read_bytes_per_s for reading in past]
    return [*lines, _disk_line(read, width, view.blocks)]


def core_lines(cores: Sequence[float], width: int, blocks: bool) -> list[Text]:
    """Each core as a bar, as a column where there are many, as one character where there are very many."""
    room = width - LABEL_WIDTH
    if not cores or room < 1:
        return []
    each = room // len(cores)
    if each >= 12:
        texts = ["".join(f"{bar(core / 100, each - 8, blocks=blocks)} {core:>3.0f} %  " for core in cores)]
    elif each >= 2:
        texts = ["".join(cells([core], 100.0, blocks=blocks) * (each - 1) + " " for core in cores)]
    else:
        texts = [cells(cores[start : start + room], 100.0, blocks=blocks) for start in range(0, len(cores), room)]
    labels = ["cores"] + [""] * (len(texts) - 1)
    return [
        Text(label.ljust(LABEL_WIDTH)).append(text.rstrip(), CPU) for label, text in zip(labels, texts, strict=True)
    ]


def _ram_line(view: WatchView, width: int) -> Text:
    host = view.now.host
    total = host.mem_limit_bytes or host.mem_total_bytes
    if host.mem_used_bytes is None or not total:
        return label_text("RAM", None)
    share = host.mem_used_bytes / total
    right = f" {used_of(host.mem_used_bytes, total)}" + (" (limit)" if host.mem_limit_bytes else "")
    room = max(0, width - LABEL_WIDTH - len(right))
    return label_text("RAM", 100 * share).append(bar(share, room, blocks=view.blocks), RAM).append(right)


def _disk_line(read: Sequence[float | None], width: int, blocks: bool) -> Text:
    """Reads, scaled to the highest rate on the screen."""
    room = width - LABEL_WIDTH
    top = max((value for value in read[-max(0, room) :] if value is not None), default=0.0)
    now = read[-1] if read else None
    line = Text("disk reads".ljust(LABEL_WIDTH))
    highest = f" {size(now)}/s, at most {size(top)}/s"
    line.append(chart_rows(read, max(0, room - len(highest)), 1, max(top, 1e6), blocks=blocks)[0], DISK)
    return line.append(highest)
