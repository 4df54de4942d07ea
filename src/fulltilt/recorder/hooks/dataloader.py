"""The hooks in DataLoaders and their iterators, in fastai's loaders, and in other libraries' iterables of batches."""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType
from typing import Any

from fulltilt.recorder.hooks import Function, Patches
from fulltilt.recorder.import_watcher import ITERABLES, DrawUnit, ImportWatcher
from fulltilt.recorder.loaders import TIMER, LoaderRegistry, named_arguments
from fulltilt.recorder.loaders.loader_stats import keep_answers
from fulltilt.recorder.recorder import Recorder
from fulltilt.records import Settings


def watch_loaders(patches: Patches, torch: Any, recorder: Recorder, loaders: LoaderRegistry) -> None:
    """Register every DataLoader, and put a timer into every iterator, whoever makes and draws from them."""

    def constructor(original: Function) -> Function:
        def __init__(loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            if loaders.override is not None and recorder.active:
                args, kwargs = loaders.override(original, loader, args, kwargs)
            original(loader, *args, **kwargs)
            if recorder.active:
                loaders.constructed(loader, tuple(named_arguments(original, args, kwargs) or ()))

        return __init__

    def iterator_constructor(original: Function) -> Function:
        def __init__(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            loaders.make_iterator(iterator, loader, lambda: original(iterator, loader, *args, **kwargs))

        return __init__

    def reset(original: Function) -> Function:
        def _reset(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
            loaders.reset_iterator(iterator, loader, lambda: original(iterator, loader, *args, **kwargs))

        return _reset

    def following(original: Function) -> Function:
        def __next__(iterator: Any) -> Any:  # noqa: N807
            timer = vars(iterator).get(TIMER)
            return original(iterator) if timer is None else timer.draw(iterator, original)

        return __next__

    loader = torch.utils.data.DataLoader
    for module in (torch.utils.data.sampler, torch.utils.data.distributed):
        patches.undo_by(keep_answers(module))
    patches.swap_subclasses(loader, __init__=constructor)
    patches.swap(loader, "__iter__", lambda original: lambda loader: loaders.iterate(original, loader))
    iterators = torch.utils.data.dataloader._BaseDataLoaderIter
    # The base's own constructor warns at the line that calls it, which has to stay torch's.
    patches.swap_subclasses(
        iterators, except_="__init__", __init__=iterator_constructor, _reset=reset, __next__=following
    )


def watch_iterables(patches: Patches, module: ModuleType, loaders: LoaderRegistry) -> None:
    """Put a timer around the iterators of a library that loops draw from without a DataLoader."""
    name, methods = ITERABLES[module.__name__]
    library = module.__name__.partition(".")[0]
    kind = getattr(module, name, None)

    def iterate(unit: DrawUnit, original: Function, iterable: Any, *args: Any, **kwargs: Any) -> Any:
        return loaders.draw_from(library, iterable, lambda: original(iterable, *args, **kwargs), unit)

    for method, unit in methods.items() if kind is not None else ():
        patches.around(kind, method, partial(iterate, unit))


def override_fastai(patches: Patches, settings: Settings) -> None:
    """Have fastai's loaders that shuffle made with the settings, once it is imported: they are not torch's."""

    def constructed(original: Function, inner: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        original(inner, loader, *args, **kwargs)
        if loader.shuffle:
            for name in ("num_workers", "pin_memory"):
                if (value := getattr(settings, name)) is not None:
                    setattr(inner, name, value)

    def imported(module: Any) -> None:
        patches.around(module._FakeLoader, "__init__", constructed)

    watcher = ImportWatcher({"fastai.data.load": imported})
    sys.meta_path.insert(0, watcher)
    patches.undo_by(lambda: sys.meta_path.remove(watcher) if watcher in sys.meta_path else None)
