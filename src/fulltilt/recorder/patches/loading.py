"""Where loaders are made and iterated over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fulltilt.recorder.loader_tap import LoaderTaps, given_arguments
from fulltilt.recorder.patches.exchange import Exchange
from fulltilt.recorder.recorder import Recorder


class LoadingPatches:
    """Puts a tap on every DataLoader."""

    def __init__(self, torch: Any, recorder: Recorder, taps: LoaderTaps) -> None:
        self._torch, self._recorder, self._taps = torch, recorder, taps

    def install(self, exchange: Exchange) -> None:
        """Stand at DataLoader's constructor and at its iter()."""
        loader = self._torch.utils.data.DataLoader
        exchange.swap(loader, "__init__", self._loader_init)
        exchange.swap(loader, "__iter__", self._loader_iter)

    def _loader_init(self, original: Callable[..., None]) -> Callable[..., None]:
        def __init__(loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            if self._taps.override is not None and self._recorder.active:
                args, kwargs = self._taps.override(original, loader, args, kwargs)
            original(loader, *args, **kwargs)
            if self._recorder.active:
                self._taps.constructed(loader, given_arguments(original, args, kwargs))

        return __init__

    def _loader_iter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __iter__(loader: Any) -> Any:  # noqa: N807
            return self._taps.iterate(original, loader)

        return __iter__
