"""Folders in a training's folder that a library writes (models, tokenizers)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from fulltilt import store
from fulltilt.errors import ForeignFiles


@contextlib.contextmanager
def written_by_library(target: Path) -> Iterator[Path]:
    """A new private folder for a library to write into, which replaces ``target`` when it is complete.

    Raises ForeignFiles where anything in ``target`` is not Fulltilt's.
    """
    from fulltilt.train import checkpoint  # imports torch, which flags and help do without

    folder = checkpoint.claim(target.parent)
    refuse_foreign(target)
    remove_private(folder, f".{target.name}.*.tmp")  # of a run that was killed
    private, before = folder.make(folder.temporary(target)), folder.temporary(target)
    try:
        yield private
        folder.record_tree(private)
        refuse_foreign(target)
        folder.move(private, target, aside=before if target.exists() else None)
    finally:
        remove_private(folder, private.name)
        folder.remove(before)


def remove_private(folder: store.OwnedFolder, pattern: str) -> None:
    """Remove private folders of ours, with everything that a library wrote there."""
    for private in folder.path.glob(pattern):
        if folder.owns(private):
            folder.record_tree(private)
            folder.remove(private)


def refuse_foreign(target: Path) -> None:
    """Raise ForeignFiles unless ``target`` in a training's folder is missing, or ours with everything in it."""
    folder = store.OwnedFolder(target.parent)
    folder.check(target)
    foreign = [path for path in sorted(target.rglob("*")) if not folder.owns(path)]
    if foreign:
        raise ForeignFiles(f"{foreign[0]} was not written by Fulltilt and is left as it is", "Move it elsewhere.")
