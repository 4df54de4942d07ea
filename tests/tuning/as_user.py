"""Run by root, `python as_user.py COMMAND` runs a command as an ordinary user who can read this Python."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

NOBODY = 65534
libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    given = [text.encode() if text else None for text in (source, target, kind, options)]
    if libc.mount(*given[:3], ctypes.c_ulong(flags), given[3]):
        raise OSError(ctypes.get_errno(), f"mount on {target}")


def open_up(folder: str) -> None:
    """Replace a private folder above Python by one that only has what Python needs, in a mount namespace of our own."""
    below = Path(sys.base_prefix).relative_to(folder).parts[0]
    kept = "/dev/shm"
    if libc.unshare(0x20000):
        raise OSError(ctypes.get_errno(), "unshare")
    mount(None, "/", None, 16384 | 1 << 18)
    mount(f"{folder}/{below}", kept, None, 4096)
    mount("tmpfs", folder, "tmpfs", 0, "mode=755")
    Path(folder, below).mkdir()
    mount(kept, f"{folder}/{below}", None, 8192)


for parent in reversed(Path(sys.base_prefix).parents):
    if not parent.stat().st_mode & 0o001:
        open_up(str(parent))
        break
os.setgroups([])
os.setgid(NOBODY)
os.setuid(NOBODY)
os.environ["HOME"] = "/nonexistent"
os.execvp(sys.argv[1], sys.argv[1:])
