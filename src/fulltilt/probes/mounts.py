"""The mounted file systems, as /proc/self/mountinfo tells them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mount:
    """One mount. ``shows`` is the folder of the file system that appears at ``point``."""

    device_number: str
    shows: str
    point: str
    filesystem: str
    source: str
    options: tuple[str, ...]


def read_mounts(root: Path = Path("/")) -> tuple[Mount, ...]:
    """All mounts in the order they were made; empty where there is no /proc."""
    try:
        lines = (root / "proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ()
    mounts = []
    for line in lines:
        # 36 35 98:0 /shows /point rw,noatime master:1 - ext3 /dev/source rw,errors=continue
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if len(fields) >= 5 and len(kind) >= 3:
            shows, point, source = (_unescape(text) for text in (fields[3], fields[4], kind[1]))
            mounts.append(Mount(fields[2], shows, point, kind[0], source, tuple(kind[2].split(","))))
    return tuple(mounts)


def mount_of(folder: Path, mounts: tuple[Mount, ...]) -> Mount | None:
    """The mount on which ``folder`` (an absolute path without links) lies: the deepest, of equals the last made."""
    found = None
    for mount in mounts:
        if folder.is_relative_to(mount.point) and (found is None or len(mount.point) >= len(found.point)):
            found = mount
    return found


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
