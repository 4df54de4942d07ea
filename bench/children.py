"""What benchmarks share: a part measured in a process of its own, and the versions that figures belong to."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil


def measured_in_child(script: str, arguments: Sequence[str], out: Path, limit_s: float) -> tuple[Any, str | None]:
    """Run ``script`` on one part, which writes its figures to ``out``: the figures, and what went wrong.

    A session of its own, so that a part that overruns is ended with all of its workers; one that crashes says where.
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
    """All that a process has started, in sessions of their own too, as a study's trials are."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def versions(packages: Iterable[str]) -> dict[str, Any]:
    """The machine and the packages that the figures belong to."""
    import torch

    found: dict[str, Any] = {"python": platform.python_version(), "cpus": os.cpu_count()}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    found["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return found
