"""The exception tree: every error a user can meet, with its exit code and its remedy.

FulltiltError
├── UsageError          2  a wrong flag, value or config
│   └── ForeignFiles    2  files that Fulltilt did not write are in the way
├── StoppedEarly        3  stopped on request; can be resumed
├── DataError           4  the user's data is damaged or not what was promised
├── DoesNotFit          5  memory is too small even at the smallest setting
├── Diverged            6  training left the finite numbers
└── MachineError        7  disk full, shared memory, permissions
    └── RunFolderError  7  a run folder cannot be read or written
        └── NotARunFolder  2  what the user named holds no run
"""

from __future__ import annotations

import errno
import os
from typing import ClassVar


class FulltiltError(Exception):
    """What happened, and what to change. Shown to the user without a traceback."""

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, remedy: str | None = None) -> None:
        super().__init__(what if remedy is None else f"{what}\n{remedy}")
        self.what = what
        self.remedy = remedy


class UsageError(FulltiltError):
    """The command line or the config is wrong."""

    exit_code = 2


class ForeignFiles(UsageError):  # noqa: N818 - it says what is wrong
    """Files that Fulltilt did not write lie where it would write. They are left as they are."""


class StoppedEarly(FulltiltError):  # noqa: N818 - not an error of anybody's
    """The job was stopped before its end and can be resumed."""

    exit_code = 3


class DataError(FulltiltError):
    """The user's data is damaged or has another shape than promised."""

    exit_code = 4


class DoesNotFit(FulltiltError):  # noqa: N818 - reads as the sentence it is
    """The job does not fit into memory, even at its smallest setting."""

    exit_code = 5


class Diverged(FulltiltError):  # noqa: N818 - reads as the sentence it is
    """Training left the finite numbers and could not be brought back."""

    exit_code = 6


class MachineError(FulltiltError):
    """The machine refused: disk full, shared memory, permissions."""

    exit_code = 7


class RunFolderError(MachineError):
    """A run folder cannot be read or written. The message names the file and, where known, the line."""


class NotARunFolder(RunFolderError):  # noqa: N818 - it says what is wrong
    """What the user named holds no run."""

    exit_code = UsageError.exit_code


_REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)


def refused_path(error: BaseException) -> MachineError | None:
    """What the system says of a path, as an error of ours; None for any other error.

    A folder may forbid even to ask what is in it, wherever it is first looked at.
    """
    if isinstance(error, OSError) and error.errno == errno.ENOENT and error.filename is None:  # getcwd
        return MachineError("the working folder is not there any more", "Change to another folder.")
    if not isinstance(error, OSError) or error.filename is None or error.errno not in _REFUSALS:
        return None
    path = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else error.filename
    return MachineError(f"cannot use {path}: {error.strerror}", "Give another path, or permission to use it.")
