"""A command in a terminal of its own, for tests: type keys, change the window, see the screen."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable

LEFT_SCREEN = b"\x1b[?1049l"
ENTERED_SCREEN = b"\x1b[?1049h"


class Terminal:
    """Runs a command on a pseudo-terminal. Use it in a ``with`` block; a command still running is killed at the end."""

    def __init__(self, *command: str, columns: int = 80, lines: int = 24) -> None:
        self.seen = b""
        self.pid, self._fd = pty.fork()
        if self.pid == 0:  # we are the command
            # A shell may have exported a size once; a screen must follow the window all the same.
            os.execvpe(command[0], command, os.environ | {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"})
        self.resize(columns, lines)
        self.modes = termios.tcgetattr(self._fd)

    @classmethod
    def fulltilt(cls, *arguments: str) -> "Terminal":
        return cls(sys.executable, "-m", "fulltilt", *arguments)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
        os.close(self._fd)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        os.write(self._fd, keys)

    def wait_for(self, happened: Callable[[], bool], within_s: float = 60.0) -> None:
        deadline_s = time.monotonic() + within_s
        while not happened():
            assert time.monotonic() < deadline_s, f"waited in vain; the end of the output is {self.seen[-2000:]!r}"
            self._read()

    def wait_for_text(self, text: str) -> None:
        self.wait_for(lambda: text in self.screen())

    def screen(self) -> str:
        """What was drawn since the cursor last went home, without colours."""
        frame = self.seen.rsplit(b"\x1b[H", 1)[-1].decode(errors="replace")
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", frame).replace("\r\n", "\n")

    def end(self) -> int:
        """Wait for the command's end; its exit code."""
        status = None

        def ended() -> bool:
            nonlocal status
            pid, found = os.waitpid(self.pid, os.WNOHANG)
            status = found if pid else None
            return pid != 0

        self.wait_for(ended)
        while self._read():
            pass
        assert status is not None
        return os.waitstatus_to_exitcode(status)

    def modes_are_restored(self) -> bool:
        return termios.tcgetattr(self._fd) == self.modes

    def _read(self) -> bool:
        if not select.select([self._fd], [], [], 0.05)[0]:
            return False
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # the command has closed the terminal
            time.sleep(0.05)
            return False
        self.seen += data
        return bool(data)
