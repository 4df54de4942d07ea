"""`fulltilt cache`: the decoded data sets that the disk tier keeps, listed and cleared."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from fulltilt.errors import UsageError


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("cache")(cache)


def cache(
    action: Annotated[str, typer.Argument(metavar="[list|clear]", help="What to do with the caches.")] = "list",
    folder: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help="The cache folder (default: FULLTILT_CACHE_DIR).")
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only caches whose name or data set contains this.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List or clear the decoded data sets kept on disk (residency "disk")."""
    if action not in ("list", "clear"):
        raise UsageError(f"cache knows list and clear, not {action!r}")
    from fulltilt.feed.caches import default_cache_dir, list_caches, remove, sweep
    from fulltilt.feed.tiers import in_words

    where = folder if folder is not None else default_cache_dir()
    entries = [
        entry for entry in list_caches(where) if name is None or name in entry.folder.name or name in entry.label
    ]
    removed = [entry for entry in entries if action == "clear" and remove(entry)]
    if action == "clear":
        sweep(where)
    if as_json:
        described = [
            {
                "folder": str(entry.folder),
                "data_set": entry.label,
                "samples": entry.samples,
                "size_bytes": entry.size_bytes,
                "complete": entry.complete,
                "in_use": entry.in_use,
                "used_at_s": entry.used_at_s,
                "removed": entry in removed,
            }
            for entry in entries
        ]
        print(json.dumps({"folder": str(where), "caches": described}, indent=1))
        return
    if action == "clear":
        freed = sum(entry.size_bytes for entry in removed)
        print(f"{len(removed)} of {len(entries)} caches removed, {in_words(freed)} freed")
        for entry in entries:
            if entry not in removed:
                why = "in use by a running job" if entry.in_use else "may not be deleted"
                print(f"{why}: {entry.folder.name}  {_printable(entry.label)}")
        return
    if not entries:
        print(f"no caches in {where}")
        return
    print(f"{'cache':<34} {'size':>10} {'samples':>9}  {'state':<10} {'used':<12} data set")
    for entry in entries:
        state = "in use" if entry.in_use else "complete" if entry.complete else "partial"
        print(
            f"{entry.folder.name[:34]:<34} {in_words(entry.size_bytes):>10} {entry.samples:>9}  {state:<10} "
            f"{_ago(entry.used_at_s):<12} {_printable(entry.label)}"
        )
    print(f"{in_words(sum(entry.size_bytes for entry in entries))} in {where}")


def _printable(label: str) -> str:
    """A path may hold anything; a terminal is to show it, not to obey it."""
    return "".join(character if character.isprintable() else "?" for character in label)


def _ago(moment_s: float) -> str:
    seconds = max(0.0, time.time() - moment_s)
    for limit, unit in ((60, "s"), (60, "min"), (24, "h")):
        if seconds < limit:
            return f"{seconds:.0f} {unit} ago"
        seconds /= limit
    return f"{seconds:.0f} days ago"
