"""Which GPUs a CUDA job sees: the rules of CUDA_VISIBLE_DEVICES, as a pure function."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence


def visible_uuids(value: str | None, gpus: Sequence[str], migs: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The UUIDs that CUDA shows for a value of CUDA_VISIBLE_DEVICES, in the order of CUDA's ordinals.

    ``gpus`` are all UUIDs in CUDA's own order; ``migs`` maps every name of a MIG device to its UUID.
    As in CUDA the first entry decides whether the list holds indices, UUIDs or MIG names, the list ends
    at the first invalid entry, and a device named twice makes the whole list empty.
    """
    if value is None:
        return tuple(gpus)
    entries = [entry.strip() for entry in value.split(",")]
    if entries[0].startswith("MIG-"):
        # CUDA lets a process use one MIG device, whatever else is listed.
        return tuple(uuid for uuid in [_by_prefix(entries[0], "MIG-", migs or {})] if uuid is not None)
    by_uuid = entries[0].startswith("GPU-")
    names = {uuid: uuid for uuid in gpus}
    chosen: list[str] = []
    for entry in entries:
        uuid = _by_prefix(entry, "GPU-", names) if by_uuid else _by_index(entry, gpus)
        if uuid is None:
            break
        if uuid in chosen:
            return ()
        chosen.append(uuid)
    return tuple(chosen)


def _by_index(entry: str, gpus: Sequence[str]) -> str | None:
    number = re.match(r"\+?(\d+)", entry)  # CUDA reads "1gpu" as 1, like C's strtoul
    index = int(number[1]) if number else len(gpus)
    return gpus[index] if index < len(gpus) else None


def _by_prefix(entry: str, kind: str, names: Mapping[str, str]) -> str | None:
    if not entry.startswith(kind):
        return None
    if entry in names:
        return names[entry]
    found = {uuid for name, uuid in names.items() if name.startswith(entry)}
    return found.pop() if len(found) == 1 else None  # an ambiguous prefix is invalid
