"""How trials start: forked from a process that has run the script up to its first touch, or from the beginning."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from fulltilt import store
from fulltilt.recorder import attach
from fulltilt.records import Settings
from fulltilt.tuning.assignment import ASSIGNMENT, ASSIGNMENT_FILE, Assignment
from fulltilt.tuning.early import SCRATCH
from fulltilt.tuning.template import CHANNEL

OUTPUT_FILE = "output.txt"
# A fork takes milliseconds, on a large process tenths of a second.
FORK_LIMIT_S = 30.0


class Started(Protocol):
    """A trial's process."""

    pid: int

    def poll(self) -> int | None:
        """Its exit status, minus its signal; None while it runs."""

    def kill(self) -> None:
        """End it and everything it started."""


class Starts(Protocol):
    """A way to start trials."""

    def start(self, folder: Path, t0_ns: int) -> Started:
        """Start a trial whose assignment lies in ``folder``."""

    def close(self) -> None:
        """No more trials come."""


def base_environment(scratch: Path) -> dict[str, str]:
    """What every process of a study inherits besides its own folder."""
    return {
        **os.environ,
        attach.ALSO: "fulltilt.tuning.child",
        attach.FIRST: "fulltilt.tuning.early",
        SCRATCH: str(scratch.resolve()),
        "FULLTILT_STUDY_PID": str(os.getpid()),
        # A trial is no run of the user's: it must not appear in their account.
        "WANDB_MODE": "disabled",
        # torch.cuda.is_available() must not touch the GPU in a process that forks.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _of_trial(folder: Path, t0_ns: int) -> dict[str, str]:
    variables = attach.environment(folder, t0_ns, None, 0)
    return {**variables, ASSIGNMENT: str((folder / ASSIGNMENT_FILE).resolve())}


# --------------------------------------------------------------------------- from the beginning


class AnewStarts:
    """Every trial starts the command from its beginning."""

    def __init__(self, command: list[str], scratch: Path) -> None:
        self._command = command
        self._scratch = scratch

    def start(self, folder: Path, t0_ns: int) -> Started:
        """Start the command with the trial's assignment."""
        environment = {**base_environment(self._scratch), **_of_trial(folder, t0_ns)}
        with (folder / OUTPUT_FILE).open("ab") as output:
            return _Whole(_popen(self._command, environment, output))

    def close(self) -> None:
        """Nothing is kept."""


class RecipeStarts:
    """Trials of `fulltilt train NAME`: their settings are flags, and nothing goes to the user's own --out."""

    def __init__(self, command: list[str], scratch: Path, out: Path) -> None:
        self._command = command
        self._scratch = scratch
        self._out = out

    def start(self, folder: Path, t0_ns: int) -> Started:
        """Start the recipe with the trial's settings as flags."""
        path = folder / ASSIGNMENT_FILE
        assignment = store.read_record(path, Assignment)
        store.write_json(path, replace(assignment, settings=Settings()))  # flags put them in force already
        flags = [*recipe_flags(assignment.settings), "--out", str(self._out), "--fresh"]
        return AnewStarts([*self._command, *flags], self._scratch).start(folder, t0_ns)

    def close(self) -> None:
        """What the trials left behind is no training of anybody's."""
        shutil.rmtree(self._out, ignore_errors=True)


def recipe_flags(settings: Settings) -> list[str]:
    """Settings as the flags that all recipes share. A later flag wins over the user's own."""
    values = {
        "--workers": settings.num_workers,
        "--batch-size": settings.batch_size,
        "--accumulation": settings.accumulation,
        "--precision": settings.precision,
    }
    flags = [word for flag, value in values.items() if value is not None for word in (flag, str(value))]
    return [*flags, "--compile"] if settings.compile else flags


class _Whole:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        _kill_group(self.pid)
        self._process.wait()


# --------------------------------------------------------------------------- forked


class ForkedStarts:
    """Every trial is a fork of one process that has run the script up to its first touch."""

    def __init__(self, process: subprocess.Popen[bytes], requests: int, replies: int) -> None:
        self.opened_in_s = 0.0
        self._process = process
        self._requests = requests
        self._replies = Lines(replies)

    @classmethod
    def open(cls, command: list[str], folder: Path, scratch: Path, limit_s: float) -> ForkedStarts | str:
        """A template that is ready to fork, or why there is none."""
        if os.name != "posix" or sys.platform == "darwin":
            return "this system does not fork processes safely"
        if command[:1] != [sys.executable] or "torch.distributed.run" in command:
            return "a launcher starts the job's processes itself"
        began = time.monotonic()
        request_end, requests = os.pipe()
        replies, reply_end = os.pipe()
        environment = {
            **base_environment(scratch),
            **attach.environment(folder, time.perf_counter_ns(), None, 0),
            CHANNEL: f"{request_end},{reply_end}",
        }
        with (folder / OUTPUT_FILE).open("wb") as output:
            process = _popen(command, environment, output, pass_fds=(request_end, reply_end))
        os.close(request_end)
        os.close(reply_end)
        starts = cls(process, requests, replies)
        try:
            first = starts._replies.next(limit_s)
        except BaseException:
            starts.close()  # Ctrl-C while the script still imports
            raise
        if first is None or not first.get("ready"):
            starts.close()
            return str(first["why"]) if first else "the script did not come to its first loader"
        starts.opened_in_s = time.monotonic() - began
        return starts

    def start(self, folder: Path, t0_ns: int) -> Started:
        """Fork a trial. Raises OSError when the template is gone."""
        request = {"environment": _of_trial(folder, t0_ns), "output": str((folder / OUTPUT_FILE).resolve())}
        os.write(self._requests, json.dumps(request).encode() + b"\n")
        reply = self._replies.next(FORK_LIMIT_S)
        if reply is None:
            raise OSError("the process that trials are forked from is gone")
        return _Fork(int(reply["pid"]), self._replies)

    def close(self) -> None:
        """End the template."""
        with contextlib.suppress(OSError):
            os.close(self._requests)
            _kill_group(self._process.pid)
        self._process.wait()
        self._replies.close()


class _Fork:
    def __init__(self, pid: int, replies: Lines) -> None:
        self.pid = pid
        self._replies = replies
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            reply = self._replies.next(0.0)
            if reply is not None:
                self._status = int(reply["status"])
        return self._status

    def kill(self) -> None:
        _kill_group(self.pid)
        if self._status is None:
            reply = self._replies.next(10.0)
            self._status = int(reply["status"]) if reply is not None else -signal.SIGKILL


class Lines:
    """JSON objects, one a line, out of a pipe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting = b""
        self._ended = False

    def next(self, patience_s: float) -> dict[str, Any] | None:
        """The next object; None when it does not come in time, or never will."""
        deadline = time.monotonic() + patience_s
        while b"\n" not in self._waiting:
            left_s = max(0.0, deadline - time.monotonic())
            readable, _, _ = select.select([self._descriptor], [], [], left_s)
            data = os.read(self._descriptor, 65536) if readable else b""
            if not data:
                self._ended = self._ended or bool(readable)
                return None
            self._waiting += data
        line, _, self._waiting = self._waiting.partition(b"\n")
        return dict(json.loads(line))

    def close(self) -> None:
        """No more lines are wanted."""
        os.close(self._descriptor)


def _popen(command: list[str], environment: dict[str, str], output: Any, **more: Any) -> subprocess.Popen[bytes]:
    # A session of its own: Ctrl-C reaches the study alone, which then ends its trial.
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        **more,
    )


def _kill_group(pid: int) -> None:
    # A fork is in its parent's group until it has made its own: then it has started nothing yet.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            kill(pid, signal.SIGKILL)
            return
