"""Which charts the page has: the steps over time, and the machine beneath them."""

from __future__ import annotations

from collections.abc import Callable

from fulltilt.records import Diagnosis, GpuReading, HostReading, Machine, Run, Sample
from fulltilt.report import series
from fulltilt.report.markup import Markup, element
from fulltilt.report.page_charts import Chart, Line, Mark, ledger_chart, line_chart
from fulltilt.report.series import Slot

GIB = 1 / (1 << 30)
MB = 1e-6
# More than this many GPUs are charted elsewhere (`fulltilt watch`); a page must stay a page.
MOST_GPUS = 16
MOST_EPOCHS = 40
# These charts are half as wide as those of the steps.
POINTS = 90


def step_charts(run: Run, diagnosis: Diagnosis) -> list[Markup]:
    """Throughput, data wait and the ledger over time, of the first rank."""
    if not run.spans or diagnosis.throughput.steps == 0:
        return []
    spans = run.spans[0]
    wall_s = series.wall_seconds(run, diagnosis.ledger.wall_s)
    of_rank = f", rank {run.ranks[0].rank}" if len(run.ranks) > 1 else ""
    epochs_s = series.epoch_starts(spans)
    epochs_s = epochs_s if len(epochs_s) <= MOST_EPOCHS else ()
    speed = Chart(
        f"Throughput{of_rank}",
        "samples/s",
        (Line("throughput", "c-compute", series.throughput(spans, wall_s)),),
        wall_s,
        marks=() if of_rank else _ceilings(diagnosis),
        epochs_s=epochs_s,
    )
    wait = Chart(
        f"Data wait{of_rank}",
        "ms a step",
        (Line("data wait", "c-data", series.data_wait(spans, wall_s)),),
        wall_s,
        scale=1000.0,
        epochs_s=epochs_s,
    )
    charts = [line_chart(speed), line_chart(wait), ledger_chart(series.ledger_over_time(spans, wall_s), wall_s)]
    return [chart for chart in charts if chart is not None]


def _ceilings(diagnosis: Diagnosis) -> tuple[Mark, ...]:
    ceilings = diagnosis.ceilings
    known = (("compute ceiling", ceilings.compute_samples_per_s), ("loader ceiling", ceilings.loader_samples_per_s))
    return tuple(Mark(name, rate) for name, rate in known if rate is not None)


def machine_charts(run: Run, diagnosis: Diagnosis) -> list[Markup]:
    """GPU, CPU, memory and disk over time, as far as they were measured."""
    wall_s = series.wall_seconds(run, diagnosis.ledger.wall_s)
    slots = series.slots(run.samples, wall_s, POINTS)
    gpus = {gpu.uuid: gpu for sample in run.samples for gpu in sample.gpus}
    charts = [
        chart
        for gpu in list(gpus.values())[:MOST_GPUS]
        for chart in _gpu_charts(gpu, series.of_gpu(slots, gpu.uuid), wall_s)
    ]
    charts += _host_charts(run.run.machine, slots, wall_s)
    return [drawn for chart in charts if (drawn := line_chart(chart)) is not None]


def _gpu_charts(gpu: GpuReading, slots: list[Slot[GpuReading]], wall_s: float) -> list[Chart]:
    def draw(label: str, colour: str, figure: Callable[[GpuReading], float | None]) -> Line:
        return Line(label, colour, series.readings(slots, figure))

    name = f"GPU {gpu.index}"
    use = (
        draw("some kernel ran", "c-compute", lambda g: g.util_pct),
        draw("SM active", "c-second", lambda g: g.sm_active_pct),
    )
    memory = (draw("used", "c-compute", lambda g: g.vram_used_bytes),)
    power = (draw("power", "c-compute", lambda g: g.power_w),)
    vram_gib = gpu.vram_total_bytes * GIB if gpu.vram_total_bytes else None
    return [
        Chart(f"{name} use", "%", use, wall_s, top=100.0),
        Chart(f"{name} memory", "GiB", memory, wall_s, scale=GIB, top=vram_gib),
        Chart(f"{name} power", "W", power, wall_s, marks=_limit("limit", gpu.power_limit_w)),
    ]


def _host_charts(machine: Machine, slots: list[Slot[Sample]], wall_s: float) -> list[Chart]:
    def draw(label: str, colour: str, figure: Callable[[HostReading], float | None]) -> Line:
        return Line(label, colour, series.readings(slots, lambda sample: figure(sample.host)))

    job = (draw("CPUs", "c-second", lambda h: h.tree_cpu_pct),)
    cpu = (
        draw("busy", "c-second", lambda h: h.cpu_pct),
        draw("waiting on storage", "c-data", lambda h: h.iowait_pct),
    )
    memory = (
        draw("this job", "c-second", lambda h: h.tree_pss_bytes),
        draw("in use altogether", "c-grey", lambda h: h.mem_used_bytes),
    )
    disk = (
        draw("read", "c-second", lambda h: h.disk_read_bytes_per_s),
        draw("written", "c-data", lambda h: h.disk_write_bytes_per_s),
    )
    usable_pct = machine.cpu.usable * 100
    limit_bytes = machine.mem_limit_bytes or machine.mem_total_bytes
    return [
        Chart("CPUs used by the job", "CPUs", job, wall_s, scale=0.01, marks=_limit("usable", usable_pct)),
        Chart("CPU of the whole machine", "%", cpu, wall_s, top=100.0),
        Chart("Memory", "GiB", memory, wall_s, scale=GIB, marks=_limit("limit", limit_bytes)),
        Chart("Disk", "MB/s", disk, wall_s, scale=MB),
    ]


def _limit(name: str, value: float | None) -> tuple[Mark, ...]:
    return () if value is None else (Mark(name, value),)


def chart_grid(charts: list[Markup], wide: bool = False) -> Markup:
    """Charts beside each other where there is room."""
    return element("div", charts, class_="charts wide" if wide else "charts")
