"""One run at a time may write into a folder of checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

from fulltilt.errors import UsageError
from fulltilt.train import durable


class FolderLock:
    """Held from construction to ``release``, or until the process ends in whatever way.

    A record lock, not flock: a loader worker that outlives a killed run by some seconds must not hold it.
    """

    def __init__(self, folder: Path) -> None:
        self._fd: int | None = None
        try:
            import fcntl
        except ImportError:  # Windows
            return
        try:
            self._fd = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise durable.cannot_write(folder / ".lock", error) from error
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            self.release()
            raise UsageError(
                f"another run is writing into {folder}", "Wait for it, or choose another --out."
            ) from error
        except OSError:  # a file system without locks; there is no telling, so let the run go on
            self.release()

    def release(self) -> None:
        """Let another run have the folder."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
