"""`fulltilt check`: the machine and its preflight, once."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from fulltilt import figures
from fulltilt.diagnosis.preflight import LoaderPlan, preflight
from fulltilt.errors import UsageError
from fulltilt.figures import NOT_MEASURED, clean
from fulltilt.probes.gpu import Gpus
from fulltilt.probes.host import HostProbe
from fulltilt.probes.machine import describe_machine
from fulltilt.probes.storage import read_storage
from fulltilt.records import SCHEMA_VERSION, CheckLine, GpuReading, HostReading, Machine, Sample, StorageReading
from fulltilt.report.console import open_console
from fulltilt.store import encode_fully

# Utilisation and GPM are means over the time between two readings; shorter ones are noise.
_GPU_READING_S = 0.5

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("check")(check)


def check(
    data: Annotated[str | None, typer.Option(metavar="DIR", help="Measure how fast this folder's files read.")] = None,
    workers: Annotated[int | None, typer.Option(metavar="N", min=0, help="Loader workers that you plan.")] = None,
    prefetch: Annotated[int | None, typer.Option(metavar="N", min=1, help="Batches each worker prefetches.")] = None,
    batch_bytes: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Size of one batch, such as 64MB or 512KiB.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Check the machine for what would slow a training job down.

    GPUs, CPUs that may really be used, memory limit, /dev/shm, torch and driver, and the storage of --data DIR.
    """
    plan = LoaderPlan(workers, prefetch, None if batch_bytes is None else parse_bytes(batch_bytes))
    console = open_console()
    if sys.stdout.isatty() and not json_:
        with console.status("looking at the machine"):
            machine, storage, sample = _look(data)
    else:
        machine, storage, sample = _look(data)
    lines = preflight(machine, storage, sample, plan)
    if json_:
        answer = {
            "schema_version": SCHEMA_VERSION,
            "machine": encode_fully(machine),
            "storage": encode_fully(storage),
            "preflight": encode_fully(lines),
        }
        print(json.dumps(answer, indent=2, allow_nan=False))
    else:
        _show_machine(console, machine, sample.host, storage, lines)


def _look(data: str | None) -> tuple[Machine, StorageReading | None, Sample]:
    start_s = time.monotonic()
    with Gpus.open() as gpus:
        machine = describe_machine(gpus)
        host = HostProbe()
        storage = None if data is None else read_storage(data)
        if machine.gpus:
            time.sleep(max(0.0, start_s + _GPU_READING_S - time.monotonic()))
            machine = dataclasses.replace(machine, gpus=gpus.read())
        return machine, storage, Sample(time.monotonic() - start_s, host.read(), machine.gpus)


def parse_bytes(text: str) -> int:
    """``64MB`` as 64,000,000 and ``64MiB`` as 67,108,864; a plain number is bytes. Raises UsageError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([kmg]i?)?b?\s*", text.lower())
    count = round(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if count <= 0:
        raise UsageError(f"--batch-bytes {text!r} is not a size", "Write it like 64MB, 512KiB or 1000000.")
    return count


# --------------------------------------------------------------------------- the screen

STATE_STYLES = {"ok": "green", "warn": "bold yellow", "fail": "bold red", "skip": "dim"}

_FACT_MARGIN = len("memory  ")
_STATE_WIDTH = len("warn ")
_LINE_MARGIN = _STATE_WIDTH + len("temperature ")


def _show_machine(
    console: Console,
    machine: Machine,
    host: HostReading,
    storage: StorageReading | None,
    lines: Sequence[CheckLine],
) -> None:
    """Print what there is, then what to think of it."""
    system = " ".join(machine.platform.split("-")[:2])
    head = Text("fulltilt check", "bold", end="")
    console.print(head, Text(clean(f" {machine.hostname}, {system}, Python {machine.python}"), "dim"))
    for name, fact in _facts(machine, host, storage):
        _print_row(console, Text(name, "cyan"), Text(clean(fact)), _FACT_MARGIN)
    console.print(Text("preflight", "bold"))
    for line in lines:
        head = Text(line.state.ljust(_STATE_WIDTH), STATE_STYLES[line.state]).append(line.name, "not bold default")
        _print_row(console, head, Text(clean(line.figure), "dim" if line.state == "skip" else ""), _LINE_MARGIN)
        if line.remedy:
            _print_row(console, Text(), Text(clean(line.remedy), "italic"), _LINE_MARGIN)


def _print_row(console: Console, head: Text, body: Text, margin: int) -> None:
    """``head`` in the left margin, ``body`` wrapped beside it, with no spaces at the ends of lines."""
    head.pad_right(margin - head.cell_len)
    for number, line in enumerate(body.wrap(console, max(20, console.width - margin))):
        line.rstrip()
        console.print(Text.assemble(head if number == 0 else " " * margin, line), no_wrap=True, crop=False)


def _facts(machine: Machine, host: HostReading, storage: StorageReading | None) -> Iterator[tuple[str, str]]:
    for gpu in machine.gpus:
        yield f"GPU {gpu.index}", f"{gpu.name}, {_tenants(gpu)}"
        yield "", _gpu_use(gpu)
    if not machine.gpus:
        yield "GPU", "none"
    load = "" if host.load_1min is None else f", load {host.load_1min:.1f}"
    yield "CPUs", f"{machine.cpu.usable:g} usable of {machine.cpu.present} present{load}"
    allowed, present = machine.mem_limit_bytes, figures.size(machine.mem_total_bytes)
    cap = present if allowed is None else f"{figures.size(allowed)} allowed ({present} present)"
    memory = f"{figures.size(host.mem_used_bytes)} used of {cap}"
    shared = f"/dev/shm {figures.size(machine.shm_free_bytes)} free of {figures.size(machine.shm_total_bytes)}"
    yield "memory", f"{memory}; {shared if machine.shm_total_bytes is not None else 'no /dev/shm'}"
    driver = "no NVIDIA driver" if machine.driver is None else f"driver {machine.driver}{_cuda(machine.driver_cuda)}"
    yield "torch", f"{machine.torch or 'not installed'}{_cuda(machine.cuda)}, {driver}"
    if storage is not None:
        yield from _storage_facts(storage)


def _cuda(version: str | None) -> str:
    return "" if version is None else f" (CUDA {version})"


def _tenants(gpu: GpuReading) -> str:
    if gpu.lost:
        return "lost"
    if gpu.processes is None:
        return "processes not known"
    names = [f"{process.name or '?'} ({process.pid})" for process in gpu.processes]
    return "no process on it" if not names else "used by " + ", ".join(names)


def _gpu_use(gpu: GpuReading) -> str:
    throttled = ", ".join(gpu.throttle_reasons or ()).replace("_", " ")
    parts = [
        f"{figures.pct(gpu.util_pct)} busy",
        "" if gpu.sm_active_pct is None else f"SM {figures.pct(gpu.sm_active_pct)}",
        f"VRAM {_vram(gpu)}",
        _of(gpu.temperature_c, gpu.temperature_limit_c, "°C"),
        _of(gpu.power_w, gpu.power_limit_w, "W"),
        f"throttled: {throttled}" if throttled else "",
    ]
    return ", ".join(part for part in parts if part)


def _of(value: float | None, limit: float | None, unit: str) -> str:
    """``40 of 87 °C``, as far as it is known."""
    if value is None:
        return NOT_MEASURED
    return f"{value:.0f}{'' if limit is None else f' of {limit:.0f}'} {unit}"


def _vram(gpu: GpuReading) -> str:
    if gpu.vram_used_bytes is None or gpu.vram_total_bytes is None:
        return figures.size(gpu.vram_used_bytes)
    return figures.used_of(gpu.vram_used_bytes, gpu.vram_total_bytes)


def _storage_facts(storage: StorageReading) -> Iterator[tuple[str, str]]:
    place = ", ".join(part for part in (storage.kind if storage.kind != "unknown" else "", storage.filesystem) if part)
    on = f"on {storage.device} ({place})" if storage.device and place else place
    count = "?" if storage.files is None else f"{storage.files:,}"
    more = "" if storage.counted_fully else "more than "
    yield "data", f"{storage.path}: {more}{count} files, {figures.size(storage.total_bytes)}, {on}"
    yield "", f"uncached {_rates(storage, 'cold')}; cached {_rates(storage, 'warm')}"


def _rates(storage: StorageReading, state: str) -> str:
    bytes_per_s: float | None = getattr(storage, f"sequential_{state}_bytes_per_s")
    files_per_s: float | None = getattr(storage, f"small_{state}_files_per_s")
    parts = []
    if bytes_per_s is not None:
        parts.append(f"{figures.size(bytes_per_s)}/s")
    if files_per_s is not None:
        parts.append(f"{figures.number(files_per_s)} files/s")
    return ", ".join(parts) or NOT_MEASURED
