"""The meter on the feed's own loaders: their batches pass through no DataLoader."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

from fulltilt.recorder.loader_tap import ENGINE, LoaderTap, LoaderTaps, TappedIterator
from fulltilt.recorder.marks import Activity
from fulltilt.recorder.owners import owner, shown_path
from fulltilt.recorder.tapped import described, tap_on


class FeedTaps:
    """All of the feed's loaders in this process; ``look`` is what ``fulltilt.onlookers`` calls for each pass."""

    def __init__(self, taps: LoaderTaps) -> None:
        self._all = taps
        self._taps: weakref.WeakKeyDictionary[Any, LoaderTap] = weakref.WeakKeyDictionary()

    def look(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of one pass, each wait for one measured."""
        recorder = self._all.recorder
        recorder.ensure_started()
        # Inside another meter's next() this loader is a part of what is measured there: the engine's steps are.
        if not recorder.active or (recorder.mine() and recorder.activity is Activity.NEXT):
            return batches
        tap = self._taps.get(loader)
        if tap is None:
            tap = self._taps[loader] = tap_on(self._all, _describe(loader), *_place())
        tap.passes += 1
        return TappedIterator(self._all, tap, batches)


def _place() -> tuple[str | None, str | None]:
    """The user's line that draws the batches, or nothing and ENGINE: settings make its loaders, not a line."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        filename = frame.f_code.co_filename.replace("\\", "/")
        if owner(filename) == "user":
            return f"{shown_path(frame.f_code.co_filename)}:{frame.f_lineno}", None
        if owner(filename) == "fulltilt" and any(room in filename for room in ("/train/", "/recipes/")):
            return None, ENGINE
        frame = frame.f_back
    return None, None


def _describe(loader: Any) -> dict[str, Any]:
    dataset, order = getattr(loader, "dataset", loader), getattr(loader, "order", None)
    return described(
        dataset,
        dataset_len=len(dataset) if dataset is not loader else getattr(order, "samples", None),
        iterable=False,
        batch_size=getattr(order, "batch_size", None),
        num_workers=getattr(loader, "workers", 0),
        persistent_workers=True,
        shuffle=getattr(order, "shuffle", None),
    )
