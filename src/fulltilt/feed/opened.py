"""Which files a data set reads, whether it names them in its attributes or not."""

from __future__ import annotations

import builtins
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Libraries, fonts and what the system tells of itself: no part of a data set.
_NOT_DATA = tuple({sys.prefix, sys.base_prefix, "/usr/", "/etc/", "/proc/", "/sys/", "/dev/"})


@contextmanager
def files_opened() -> Iterator[set[str]]:
    """The files that Python code opens for reading within the block, as absolute paths; those of C libraries not.

    ``open`` is exchanged in ``builtins`` and ``io`` for it, and put back.
    """
    found: set[str] = set()
    original = builtins.open

    def watched(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        handle = original(file, mode, *args, **kwargs)
        if isinstance(file, str | os.PathLike) and not set(mode) & set("wxa+"):
            path = os.path.abspath(os.fsdecode(file))  # noqa: PTH100 - in every draw
            if not path.startswith(_NOT_DATA) and not path.endswith((".py", ".pyc")):
                found.add(path)
        return handle

    builtins.open = io.open = watched
    try:
        yield found
    finally:
        builtins.open = io.open = original
