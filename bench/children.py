"""What benchmarks share: parts measured in a child process, the versions behind figures, draining the GPU."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

# For files whose reads and writes are not to be measured.
IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


def process_start_s() -> float:
    """When this process began, on the monotonic clock: importing torch alone may take many seconds."""
    return time.monotonic() - (time.time() - psutil.Process().create_time())


def drain(device: torch.device) -> None:
    """Wait until the GPU has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measured_in_child(script: str, arguments: Sequence[str], out: Path, limit_s: float) -> tuple[Any, str | None]:
    """Run ``script`` on one part, which writes its figures to ``out``; returns them, and what went wrong.

    It runs in a session of its own: a part that overruns is killed with all of its workers.
    """
    out.unlink(missing_ok=True)
    command = [sys.executable, "-X", "faulthandler", script, *arguments]
    process = subprocess.Popen(command, start_new_session=True)
    problem = None
    try:
        process.wait(limit_s)
        code = process.returncode
        problem = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}" if code else None
    except BaseException as error:
        others = _descendants(process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for other in others:
            with contextlib.suppress(psutil.Error):
                other.kill()
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        problem = f"ran past {limit_s:.0f} s"
    return json.loads(out.read_text()) if out.exists() else {}, problem


def _descendants(pid: int) -> list[psutil.Process]:
    """All descendants of a process, also in other sessions, as the trials of a study are."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def versions(packages: Iterable[str]) -> dict[str, Any]:
    """The machine and the package versions that figures belong to."""
    found: dict[str, Any] = {"python": platform.python_version(), "cpus": os.cpu_count()}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    found["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return found
