"""All loaders of the process: DataLoaders from their construction on, the feed's own, and any iterable of batches."""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from multiprocessing import reduction
from types import CodeType, FunctionType
from typing import Any, Generic, NamedTuple, TypeVar

from fulltilt.recorder.import_watcher import Brings
from fulltilt.recorder.loaders import workers
from fulltilt.recorder.loaders.iterator import Drawing, LoaderTap, PassMeter, TappedIterator, describe, is_iterable
from fulltilt.recorder.marks import Activity, PassBegan
from fulltilt.recorder.stacks.frames import callers, shown_line, users_line
from fulltilt.recorder.user_code import own_package, owner

# What a loader is ``made_by`` when the engine has made it from the settings of a training.
ENGINE = "fulltilt"
# An iterator's attribute that holds its meter.
METER = "_fulltilt_meter"
TORCHS_ITERATORS = "torch.utils.data.dataloader"
# Parts of Fulltilt that stand in a call of the user's, rather than making one of their own.
OBSERVING = ("recorder", "tuning")
# Makes loaders out of those that the user, or another library, has made.
PASSES_ON = "accelerate"
NEAREST_SITES = 4  # lines that tell the places of two loaders apart


class CallSites(NamedTuple):
    """Where a loader was constructed: the user's line, the library that line calls, and the nearest lines of all."""

    where: str | None
    made_by: str | None
    nearest: tuple[str, ...]


def call_sites(loader: Any) -> CallSites:
    """The calls that led to the construction of a loader, outside of torch and of the construction itself."""
    sites: list[str] = []
    where: str | None = None
    library: str | None = None
    constructors = _constructors(type(loader))
    for frame in callers(sys._getframe(1)):
        if where is not None and len(sites) >= NEAREST_SITES:
            break
        code = frame.f_code
        who = owner(code.co_filename)
        if who in ("user", "site") and code not in constructors:
            sites.append(shown_line(frame))
            if where is None and who == "user":
                where = sites[-1]
            elif where is None and library in (None, PASSES_ON):
                library = str(frame.f_globals.get("__name__", "")).partition(".")[0] or None
        elif who == "fulltilt" and where is None and own_package(code.co_filename) not in OBSERVING:
            library = ENGINE
    if library == ENGINE:
        # Settings make the loader; on the line that starts the training there is nothing to change.
        return CallSites(None, ENGINE, tuple(sites[:NEAREST_SITES]))
    return CallSites(where or (sites[0] if sites else None), library, tuple(sites[:NEAREST_SITES]))


def _constructors(kind: type) -> set[CodeType]:
    """The code of the constructors of a class and its bases, with the wrappers that libraries put around them.

    Known by their code and not by their ``self``: reading a frame's locals keeps all of them alive until it returns.
    """
    found: set[CodeType] = set()
    for base in kind.__mro__:
        function = vars(base).get("__init__")
        while function is not None:
            if isinstance(function, FunctionType):
                found.add(function.__code__)
            function = getattr(function, "__wrapped__", None)
    return found


def named_arguments(
    original: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """The arguments of a DataLoader(...) call by name; None where the class only passes them on, without names."""
    signature = inspect.signature(original)
    try:
        given = dict(signature.bind(None, *args, **kwargs).arguments)
    except TypeError:
        return None  # the constructor itself will complain
    given.pop("self", None)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL and name in given:
            return None
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given.update(given.pop(name, {}))
    return given


class LoaderTaps(Drawing):
    """All DataLoaders of the process."""

    def __init__(self, recorder: Any, torch: Any) -> None:
        super().__init__(recorder, torch.is_grad_enabled)
        workers.own_recorder = recorder
        self.mailbox = workers.Mailbox()
        self.starting_workers = False
        self.override: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]] | None = None
        # Called for each pass with the loader, its tap and DataLoader.__iter__; returns the source of batches.
        self.live: Callable[[Any, LoaderTap, Callable[[Any], Any]], Any] | None = None
        self._torch_loader = torch.utils.data.DataLoader
        self._making = threading.local()
        self._taps: weakref.WeakKeyDictionary[Any, LoaderTap] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._start_lock = threading.RLock()  # one thread's at a time: torch's worker loop is exchanged meanwhile
        self.all: list[LoaderTap] = []
        # A loader made anew in each epoch is one loader to its user: same lines of the script, same length.
        self._made_before: dict[tuple[Any, ...], LoaderTap] = {}

    def of(self, loader: Any) -> LoaderTap:
        """The tap of a loader, made when it is first seen."""
        with self._lock:
            tap = self._taps.get(loader)
            if tap is None:
                tap = self._taps[loader] = self._new(loader)
                if not isinstance(loader, self._torch_loader):  # its constructor told nothing
                    tap.where, tap.made_by, _ = call_sites(loader)
            return tap

    def _new(self, loader: Any) -> LoaderTap:
        unbatched = getattr(loader, "batch_sampler", None) is None and not is_iterable(loader)
        tap = LoaderTap(len(self.all), None, (), weakref.ref(loader), asked_for=1 if unbatched else None)
        self.all.append(tap)
        return tap

    def constructed(self, loader: Any, given: tuple[str, ...]) -> None:
        """Remember where a loader was constructed and which arguments were written there."""
        if loader in self._taps:
            self._taps[loader].given = given or self._taps[loader].given  # a class around it: what the user wrote
            return
        self.recorder.ensure_started()
        sites = call_sites(loader)
        described = describe(loader)
        # A library may make all its loaders at one line of the user's, without a length: Keras, of a PyDataset.
        key = (*sites.nearest, described["dataset_len"], sites.made_by is not None and self.recorder.eval_mode)
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
        """DataLoader.__iter__: torch's own, whose iterator measures itself, or what live tuning puts in its place."""
        if self.live is None or not self.recorder.active or not self._measures:
            return original(loader)
        tap, live = self.of(loader), self.live

        def unmeasured(each: Any) -> Iterator[Any]:
            with self._unmeasured():
                return original(each)

        return TappedIterator(self, tap, self._begin_pass(loader, tap, lambda: live(loader, tap, unmeasured)))

    def make_iterator(self, iterator: Any, loader: Any, make: Callable[[], None]) -> None:
        """The constructor ``make`` of one of torch's iterators, or of a class derived from them, with a meter set."""
        if METER in vars(iterator) or not self.recorder.active or not self._measures:
            make()
            return
        tap = self.of(loader)
        vars(iterator)[METER] = PassMeter(self, tap)
        measured = partial(self.with_meters, make, tap, type(iterator).__module__) if loader.num_workers else make
        self._begin_pass(loader, tap, measured)
        if self.live is not None:
            self.live(loader, tap, lambda _: iterator)  # not by DataLoader.__iter__: it can only take note

    def reset_iterator(self, iterator: Any, loader: Any, reset: Callable[[], None]) -> None:
        """An iterator whose workers persist begins another pass."""
        meter = vars(iterator).get(METER)
        if meter is None or not self.recorder.active or meter.first:
            reset()
            return
        meter.first = True
        self._begin_pass(loader, self.of(loader), reset)

    def draw_from(self, library: str, iterable: Any, begin: Callable[[], Any], brings: Brings) -> Any:
        """The iterator of a library's that ``begin`` makes, with a meter where the training thread draws from it."""
        recorder = self.recorder
        if recorder.active and self._measures:
            recorder.ensure_started()
        # What a DataLoader draws from, or another such iterator, is a part of it.
        if not recorder.mine() or recorder.activity is not Activity.USER:
            return begin()
        where, _ = users_line()
        with self._lock:
            key = (library, where, type(iterable).__name__)
            tap = self._made_before.get(key)
            if tap is None:
                tap = self._made_before[key] = tap_on(self, described(iterable), where, made_by=library)
        return LibraryIterator(self, tap, self._begin_pass(None, tap, begin), brings)

    def observe_feed(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of one pass of a loader of the feed's, each wait for one measured."""
        recorder = self.recorder
        recorder.ensure_started()
        # Inside another meter's next() this loader is a part of what is measured there: the engine's steps are.
        if not recorder.active or (recorder.mine() and recorder.activity is Activity.DATA_WAIT):
            return batches
        tap = self._taps.get(loader)
        if tap is None:
            tap = self._taps[loader] = tap_on(self, _describe(loader), *_place())
        tap.passes += 1
        return TappedIterator(self, tap, batches)

    def _begin_pass(self, loader: Any, tap: LoaderTap, start: Callable[[], Any]) -> Any:
        recorder = self.recorder
        recorder.wake()
        if loader is not None:
            tap.look_at(loader)
        tap.passes += 1
        tap.in_pass = True
        tap.pass_began_s = time.perf_counter()
        if not recorder.mine():
            return start()
        began = time.perf_counter()
        before = recorder.switch(Activity.EPOCH_TURNOVER, PassBegan(tap.loader_id, self.evaluating(tap)))
        try:
            return start()
        finally:
            recorder.switch(before)
            if tap.passes > 1:
                tap.restart_s += time.perf_counter() - began

    @property
    def _measures(self) -> bool:
        return not getattr(self._making, "unmeasured", False)

    @contextlib.contextmanager
    def _unmeasured(self) -> Iterator[None]:
        """What makes iterators here, on this thread, draws from them for a meter outside."""
        before, self._making.unmeasured = not self._measures, True
        try:
            yield
        finally:
            self._making.unmeasured = before

    def with_meters(self, start: Callable[[], Any], tap: LoaderTap, module: str = TORCHS_ITERATORS) -> Any:
        """Let workers start while the worker loop that ``module`` gives them is exchanged for the measured one."""
        home = workers.home_of_loop(module)
        mailbox = self.mailbox.opened()
        if mailbox is None:
            return start()
        with self._start_lock:
            loop, dump = home._worker_loop, reduction.dump
            if getattr(loop, "func", None) is not workers.run_worker:  # a data set may start workers of its own
                workers.plain_loops[home.__name__] = loop
            home._worker_loop = partial(workers.run_worker, mailbox, tap.loader_id, tap.passes, home.__name__)
            reduction.dump = partial(_count_pickled, tap, dump)  # called for workers that are not forked
            self.starting_workers = True
            try:
                return start()
            finally:
                self.starting_workers = False
                home._worker_loop, reduction.dump = loop, dump


def _count_pickled(tap: LoaderTap, dump: Callable[..., Any], obj: Any, file: Any, *args: Any) -> None:
    """multiprocessing.reduction.dump, with its bytes and seconds counted. Of each worker its process comes last."""
    began, before = time.perf_counter(), file.tell()
    dump(obj, file, *args)
    tap.pickle_s += time.perf_counter() - began
    tap.pickled_bytes += file.tell() - before
    tap.pickled_workers += not isinstance(obj, dict)  # what prepares the interpreter is a dict


class LibraryIterator(TappedIterator):
    """An iterator of a library's, which knows what one draw from it brings."""

    defers = True

    def __init__(self, taps: LoaderTaps, tap: LoaderTap, source: Any, brings: Brings) -> None:
        super().__init__(taps, tap, source)
        self._brings = brings

    def _samples_of(self, batch: Any) -> int | None:
        if self._brings == "sample" or (isinstance(batch, Mapping) and "__key__" in batch):  # WebDataset's, not batched
            return 1
        if self._brings == "columns" and isinstance(batch, Mapping):
            return max((len(column) for column in batch.values()), default=0)
        return super()._samples_of(batch)


Item = TypeVar("Item")


class TappedIterable(Generic[Item]):
    """Any iterable of batches with the loader's meter on it."""

    def __init__(self, taps: LoaderTaps, batches: Iterable[Item]) -> None:
        self._taps = taps
        self._batches = batches
        where, _ = users_line()
        self._tap = tap_on(taps, described(batches), where, made_by="script")

    def __iter__(self) -> Iterator[Item]:
        self._tap.passes += 1
        return TappedIterator(self._taps, self._tap, iter(self._batches))

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def tap_on(taps: LoaderTaps, what: dict[str, Any], where: str | None, made_by: str | None = None) -> LoaderTap:
    """A new tap for something that is no DataLoader: what ``what`` says of it stays as it is."""
    tap = LoaderTap(len(taps.all), where, (), lambda: None, what, made_by=made_by)
    taps.all.append(tap)
    return tap


def described(batches: Iterable[Any], **known: Any) -> dict[str, Any]:
    """What a loader record says of an iterable; what is not ``known`` is as for one on the training thread."""
    unknown = {"dataset_len": None, "iterable": True, "batch_size": None, "num_workers": 0}
    return {"dataset": type(batches).__name__, **unknown, **known}


def _place() -> tuple[str | None, str | None]:
    """The user's line that draws the batches, or nothing and ENGINE: settings make its loaders, not a line."""
    for frame in callers(sys._getframe(2)):
        filename = frame.f_code.co_filename
        if owner(filename) == "user":
            return shown_line(frame), None
        if own_package(filename) in ("train", "recipes"):
            return None, ENGINE
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
