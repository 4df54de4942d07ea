"""`fulltilt check`: what of this machine would slow a training job down."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import sys
import time
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from fulltilt.diagnosis.preflight import LoaderPlan, preflight
from fulltilt.errors import UsageError
from fulltilt.figures import clean
from fulltilt.probes.gpu import Gpus
from fulltilt.probes.host import HostProbe
from fulltilt.probes.machine import describe_machine
from fulltilt.probes.storage import read_storage
from fulltilt.records import SCHEMA_VERSION, CheckLine, Machine, Sample, StorageReading
from fulltilt.report.console import open_console
from fulltilt.store import encode

# Utilisation and GPM are means over the time between two readings; shorter ones are noise.
_GPU_READING_S = 0.5

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


EXAMPLES = (
    "fulltilt check",
    "fulltilt check --data /data/images",
    "fulltilt check --data /data --workers 8 --batch-bytes 38MB",
)


def check(
    data: Annotated[
        str | None, typer.Option(metavar="DIR", help="Measure how fast the files of this folder are read.")
    ] = None,
    workers: Annotated[int | None, typer.Option(metavar="N", min=0, help="Loader workers you plan to use.")] = None,
    prefetch: Annotated[int | None, typer.Option(metavar="N", min=1, help="Batches each worker prefetches.")] = None,
    batch_bytes: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Size of one batch, such as 64MB or 512KiB.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Check the machine for what would slow a training job down.

    Checks GPUs, usable CPUs, memory limit, /dev/shm, torch and driver, and the storage of --data DIR.
    """
    plan = LoaderPlan(workers, prefetch, None if batch_bytes is None else parse_bytes(batch_bytes))
    console = open_console()
    with console.status("checking the machine") if sys.stdout.isatty() and not json_ else contextlib.nullcontext():
        machine, storage, sample = _read_machine(data)
    lines = preflight(machine, storage, sample, plan)
    if json_:
        answer = {
            "schema_version": SCHEMA_VERSION,
            "machine": encode(machine, fully=True),
            "storage": encode(storage, fully=True),
            "preflight": encode(lines, fully=True),
        }
        print(json.dumps(answer, indent=2, allow_nan=False))
    else:
        _show(console, machine, lines)


def _read_machine(data: str | None) -> tuple[Machine, StorageReading | None, Sample]:
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

_STATE_WIDTH = len("warn ")
_LINE_MARGIN = _STATE_WIDTH + len("temperature ")


def _show(console: Console, machine: Machine, lines: Sequence[CheckLine]) -> None:
    system = " ".join(machine.platform.split("-")[:2])
    head = Text("fulltilt check", "bold", end="")
    console.print(head, Text(clean(f" {machine.hostname}, {system}, Python {machine.python}"), "dim"))
    console.print(Text("preflight", "bold"))
    for line in lines:
        head = Text(line.state.ljust(_STATE_WIDTH), STATE_STYLES[line.state]).append(line.name, "not bold default")
        _print_row(console, head, Text(clean(line.figure), "dim" if line.state == "skip" else ""))
        if line.remedy:
            _print_row(console, Text(), Text(clean(line.remedy), "italic"))


def _print_row(console: Console, head: Text, body: Text) -> None:
    """Print ``head`` in the left margin and ``body`` wrapped beside it, without trailing spaces."""
    head.pad_right(_LINE_MARGIN - head.cell_len)
    for number, line in enumerate(body.wrap(console, max(20, console.width - _LINE_MARGIN))):
        line.rstrip()
        console.print(Text.assemble(head if number == 0 else " " * _LINE_MARGIN, line), no_wrap=True, crop=False)
