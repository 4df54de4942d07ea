"""All DataLoaders of the process, from their construction through every pass."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from fulltilt.recorder import worker_tap
from fulltilt.recorder.loader_tap.drawing import Drawing
from fulltilt.recorder.loader_tap.iterator import TappedIterator
from fulltilt.recorder.loader_tap.sites import call_sites
from fulltilt.recorder.loader_tap.tap import LoaderTap, describe, is_iterable
from fulltilt.recorder.marks import Activity, PassBegan


class LoaderTaps(Drawing):
    """All DataLoaders of the process."""

    def __init__(self, recorder: Any, torch: Any) -> None:
        super().__init__(recorder, torch.is_grad_enabled)
        self.mailbox = worker_tap.Mailbox()
        self.starting_workers = False
        self.override: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]] | None = None
        # Called for each pass with the loader, its tap and what would begin the pass; returns the source of batches.
        self.live: Callable[[Any, LoaderTap, Callable[[], Any]], Any] | None = None
        self._torch = torch
        self._taps: weakref.WeakKeyDictionary[Any, LoaderTap] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self.all: list[LoaderTap] = []
        # A loader made anew in each epoch is one loader to its user: same lines of the script, same length.
        self._made_before: dict[tuple[Any, ...], LoaderTap] = {}

    def of(self, loader: Any) -> LoaderTap:
        """The tap of a loader, made when it is first seen."""
        with self._lock:
            tap = self._taps.get(loader)
            if tap is None:
                tap = self._taps[loader] = self._new(loader)
            return tap

    def _new(self, loader: Any) -> LoaderTap:
        unbatched = getattr(loader, "batch_sampler", None) is None and not is_iterable(loader)
        tap = LoaderTap(len(self.all), None, (), weakref.ref(loader), asked_for=1 if unbatched else None)
        self.all.append(tap)
        return tap

    def constructed(self, loader: Any, given: tuple[str, ...]) -> None:
        """Remember where a loader was constructed and which arguments were written there."""
        self.recorder.ensure_started()
        sites = call_sites(loader)
        described = describe(loader)
        key = (*sites.nearest, described["dataset_len"])
        with self._lock:
            tap = self._made_before.get(key)
            if tap is None or not tap.retired():
                self._made_before[key] = tap = self._new(loader)
            tap.loader = weakref.ref(loader)
            tap.constructed += 1
            self._taps[loader] = tap
        tap.where, tap.made_by, tap.given = sites.where, sites.made_by, given
        tap.described = described
        if sites.made_by is not None:
            self._inherit(tap, loader.dataset)

    def _inherit(self, tap: LoaderTap, dataset: Any) -> None:
        """A library made this loader out of one of the user's (accelerate does): then the user's call is the place."""
        for other in self.all:
            made = other.loader()
            if other.made_by is None and other is not tap and made is not None and made.dataset is dataset:
                tap.where, tap.made_by, tap.given = other.where, None, other.given
                return

    def iterate(self, original: Callable[[Any], Iterator[Any]], loader: Any) -> Iterator[Any]:
        """DataLoader.__iter__ with the tap in between."""
        recorder = self.recorder
        tap = self.of(loader)
        if not recorder.active:
            return original(loader)
        recorder.wake()
        tap.described = describe(loader)
        tap.passes += 1
        tap.in_pass = True
        if not recorder.mine():
            return TappedIterator(self, tap, self._begin(original, loader, tap))
        evaluating = self.evaluating(tap)
        began = time.perf_counter()
        before = recorder.switch(Activity.ITER, PassBegan(tap.loader_id, evaluating))
        try:
            source = self._begin(original, loader, tap)
        finally:
            recorder.switch(before)
        if tap.passes > 1:
            tap.restart_s += time.perf_counter() - began
        return TappedIterator(self, tap, source)

    def _begin(self, original: Callable[[Any], Any], loader: Any, tap: LoaderTap) -> Any:
        begin = partial(self.with_meters, partial(original, loader), tap)
        return begin() if self.live is None else self.live(loader, tap, begin)

    def with_meters(self, start: Callable[[], Any], tap: LoaderTap) -> Any:
        """Let torch start workers while its worker loop is exchanged for the measured one."""
        workers = self._torch.utils.data._utils.worker
        mailbox = self.mailbox.opened()
        if mailbox is None:
            return start()
        plain = worker_tap.plain_loop = workers._worker_loop
        workers._worker_loop = partial(worker_tap.run_worker, mailbox, tap.loader_id)
        self.starting_workers = True
        try:
            return start()
        finally:
            self.starting_workers = False
            workers._worker_loop = plain
