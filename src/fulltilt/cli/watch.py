"""`fulltilt watch`: a live monitor for a second terminal; plain lines where the output is no terminal."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from fulltilt.cli.streams import tell
from fulltilt.errors import ForeignFiles, RunFolderError, UsageError
from fulltilt.probes.gpu import Gpus
from fulltilt.probes.jobs import JobProbe
from fulltilt.probes.sampler import Sampler
from fulltilt.records import Sample
from fulltilt.report.console import open_console
from fulltilt.report.status_line import sample_lines
from fulltilt.report.watch_screen import WatchView, watch_lines
from fulltilt.store import LineWriter, read_lines

# The longest history that any window shows, at one column a sample.
_MOST_SAMPLES = 1000

# How soon a key and a new window size are noticed.
_KEY_WAIT_S = 0.1

# CPU use and SM activity are means between two moments: one reading takes this long.
_ONCE_S = 0.5

_QUIT = ("q", "Q")
_SUSPEND = "\x1a"  # Ctrl-Z


EXAMPLES = ("fulltilt watch", "fulltilt watch --once", "fulltilt watch --interval 5 --out gpu.jsonl > /dev/null &")


def watch(
    interval: Annotated[float, typer.Option(metavar="SECONDS", help="Time between two readings.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one reading and end.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Append the readings to this file, one JSON object a line.")
    ] = None,
) -> None:
    """Watch GPUs, CPUs, memory, disk and training jobs live; q quits.

    Where the output is not a terminal, and with --once, prints one line for each GPU and reading.
    """
    if not 0.1 <= interval <= 3600:
        raise UsageError(f"--interval {interval:g} is not between 0.1 and 3600 seconds")
    # Before the screen opens, so that an error stays readable.
    readings = Readings(None if out is None else _opened(out))
    console = open_console(follows_window=True)
    with contextlib.closing(readings), Gpus.open(all_devices=True) as gpus:
        sampler = Sampler(readings.arrived.put, gpus=gpus, interval_s=min(interval, _ONCE_S) if once else interval)
        with sampler, contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is the usual way to end a monitor
            if not once and sys.stdout.isatty() and not console.is_dumb_terminal:
                _show_until_quit(readings, WatchScreen(console, gpus, interval, None if out is None else str(out)))
            else:
                _print_lines(readings, gpus, once)


def _opened(out: Path) -> LineWriter:
    """The file to append readings to. Raises ForeignFiles where it holds something else."""
    try:
        if out.is_file() and out.stat().st_size:
            next(read_lines(out, Sample))
    except (RunFolderError, StopIteration) as error:
        what = f"{out} exists and does not hold readings of fulltilt watch"
        raise ForeignFiles(what, "Choose another file with --out.") from error
    return LineWriter(out)


class Readings:
    """Samples that the sampler's thread has taken; written to a file as they are fetched."""

    def __init__(self, writer: LineWriter | None) -> None:
        self.arrived: queue.SimpleQueue[Sample] = queue.SimpleQueue()
        self._writer = writer

    def close(self) -> None:
        """No more samples come."""
        if self._writer is not None:
            self._writer.close()

    def take(self, wait: bool) -> Sample | None:
        """The next sample, also written to the file; None if there is none yet. Raises RunFolderError."""
        try:
            sample = self.arrived.get(block=wait)
        except queue.Empty:
            return None
        if self._writer is not None:
            self._writer.write([sample])
        return sample


def _print_lines(readings: Readings, gpus: Gpus, once: bool) -> None:
    if gpus.why_none is not None:
        tell(f"fulltilt: no GPU: {gpus.why_none}; showing the host")
    readings.arrived.get()  # the first has no rates yet
    while (sample := readings.take(wait=True)) is not None:
        print("\n".join(sample_lines(sample)), flush=True)
        if once:
            return


class WatchScreen:
    """The recent samples and the jobs, drawn for the window's current size."""

    def __init__(self, console: Console, gpus: Gpus, interval_s: float, recording: str | None) -> None:
        self.console = console
        self._gpus = gpus
        self._interval_s = interval_s
        self._recording = recording
        self._samples: deque[Sample] = deque(maxlen=_MOST_SAMPLES)
        self._job_probe = JobProbe()
        self._jobs = self._job_probe.read()

    def add(self, sample: Sample) -> None:
        """Show this sample too."""
        self._samples.append(sample)
        self._jobs = self._job_probe.read(process for gpu in sample.gpus for process in gpu.processes or ())

    def draw(self) -> Text:
        """The whole screen."""
        view = WatchView(
            hostname=socket.gethostname(),
            clock=time.strftime("%H:%M:%S"),
            interval_s=self._interval_s,
            samples=tuple(self._samples),
            jobs=self._jobs,
            why_no_gpu=self._gpus.why_none,
            recording=self._recording,
        )
        return Text("\n").join(watch_lines(view, self.console.width, self.console.height))


def _show_until_quit(readings: Readings, screen: WatchScreen) -> None:
    # `kill` must restore the terminal, too.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    while _show_until_key(readings, screen) == _SUSPEND:
        os.kill(0, signal.SIGTSTP)  # stops the whole process group, as the terminal would; `fg` continues


def _show_until_key(readings: Readings, screen: WatchScreen) -> str:
    """Draw until a key ends it; returns that key. The terminal is restored."""
    live = Live(console=screen.console, screen=True, auto_refresh=False)
    with _keyboard() as next_key, live:
        drawn, key = None, ""
        while key not in (*_QUIT, _SUSPEND):
            while (sample := readings.take(wait=False)) is not None:
                screen.add(sample)
                drawn = None
            if drawn != screen.console.size:
                drawn = screen.console.size
                live.update(screen.draw(), refresh=True)
            key = next_key(_KEY_WAIT_S)
        return key


def _no_key(wait_s: float) -> str:
    time.sleep(wait_s)
    return ""


@contextlib.contextmanager
def _keyboard() -> Iterator[Callable[[float], str]]:
    """A function that waits some seconds for a key and returns it, or ``""``. Restores the terminal."""
    if sys.platform == "win32" or not sys.stdin.isatty():  # Ctrl-C ends it there
        yield _no_key
        return

    import termios
    import tty

    keyboard = sys.stdin.fileno()

    def key(wait_s: float) -> str:
        if not select.select([keyboard], [], [], wait_s)[0]:
            return ""
        return os.read(keyboard, 1).decode(errors="replace") or _QUIT[0]  # the terminal has gone

    before = termios.tcgetattr(keyboard)
    try:
        tty.setcbreak(keyboard)
        mode = termios.tcgetattr(keyboard)
        mode[3] |= termios.NOFLSH  # or Ctrl-C would discard a key that is about to be read, and be lost with it
        mode[6][termios.VSUSP] = b"\0"  # Ctrl-Z comes as a key: the screen must be left before we stop
        termios.tcsetattr(keyboard, termios.TCSANOW, mode)
        yield key
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
