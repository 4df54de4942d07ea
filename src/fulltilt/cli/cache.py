"""`fulltilt cache`: the decoded data sets that the disk tier keeps, listed and cleared."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from fulltilt.errors import UsageError

EXAMPLES = ("fulltilt cache", "fulltilt cache clear --name COD10K", "fulltilt cache list --json")


def cache(
    action: Annotated[str, typer.Argument(metavar="list|clear", help="List or delete the caches.")] = "list",
    folder: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help="The cache folder [default: $FULLTILT_CACHE_DIR]")
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only caches whose name or data set contains this.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """List or clear the decoded data sets kept on disk."""
    if action not in ("list", "clear"):
        raise UsageError(f"cache takes list or clear, not {action!r}")
    from fulltilt.feed.disk_cache import default_cache_dir, folder_of_caches, list_caches, remove, sweep
    from fulltilt.figures import one_line, size

    where = folder_of_caches(folder if folder is not None else default_cache_dir())
    entries = [entry for entry in list_caches(where) if name is None or name in entry.path.name or name in entry.label]
    removed = [entry for entry in entries if action == "clear" and remove(entry)]
    left_over = sweep(where) if action == "clear" else 0
    if as_json:
        described = [
            {
                "folder": str(entry.path),
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
        print(json.dumps({"folder": str(where), "caches": described, "left_over_removed": left_over}, indent=1))
        return
    if action == "clear":
        freed = sum(entry.size_bytes for entry in removed)
        print(f"{len(removed)} of {len(entries)} caches removed, {size(freed)} freed")
        if left_over:
            print(f"{left_over} unfinished caches of killed jobs removed")
        for entry in entries:
            if entry not in removed:
                why = "in use by a running job" if entry.in_use else "may not be deleted"
                print(f"{why}: {one_line(entry.path.name)}  {one_line(entry.label)}")
        return
    if not entries:
        print(f"no caches in {one_line(str(where))}")
        return
    print(f"{'cache':<34} {'size':>10} {'samples':>9}  {'state':<10} {'used':<16} data set")
    for entry in entries:
        state = "in use" if entry.in_use else "complete" if entry.complete else "partial"
        print(
            f"{one_line(entry.path.name)[:34]:<34} {size(entry.size_bytes):>10} {entry.samples:>9}  {state:<10} "
            f"{datetime.fromtimestamp(entry.used_at_s):%Y-%m-%d %H:%M} {one_line(entry.label)}"
        )
    print(f"{size(sum(entry.size_bytes for entry in entries))} in {one_line(str(where))}")
