"""Every patch: which entry point, what is noted there, and how the original is put back.

| entry point                         | noted                                          |
|-------------------------------------|------------------------------------------------|
| utils.data.DataLoader.__init__      | where it was called, what was written there    |
| utils.data.DataLoader.__iter__      | nothing: live tuning gives its own iterator    |
| utils.data's iterators: __init__,   | passes and batches, of all loaders that have   |
| _reset, __next__                    | torch's iterators or classes derived from them |
| iterables of other libraries        | passes and batches (see ``import_watcher``)    |
| fastai's loaders: __init__          | nothing: settings from outside are put there   |
| autograd.backward, autograd.grad    | backward, and where gradients are exchanged    |
| optim (global step hooks)           | steps                                          |
| cuda.CUDAGraph                      | steps that are replays                         |
| compile, dynamo's callbacks         | compiling, which is start-up                   |
| amp.GradScaler.step                 | steps that the scaler skipped                  |
| amp.autocast.__enter__              | the precision in force                         |
| save                                | checkpoints                                    |
| nn.Module.train                     | evaluation mode of the trained model           |
| no_grad, inference_mode: __enter__, | long work with gradients off                   |
| __exit__                            |                                                |
| Tensor.to, .cuda                    | copies to the GPU                              |
| Tensor.item, .tolist, .cpu, bool(), | waits for the GPU                              |
| float(), int(), .nonzero            | (from the first step on a GPU on)              |
| cuda.synchronize                    | waits for the GPU                              |
| distributed.all_reduce, …, Work.wait | explicit collectives, and waits for them      |
| nn.parallel.DistributedDataParallel | the replica, for its own timings               |
| gc.callbacks, gc.collect            | garbage collections                            |
| threading.enumerate, active_count   | nothing: the script finds its own threads      |
| sys.excepthook, threading.excepthook | nothing: errors are shown without our frames  |

For the caller everything behaves as before: same values, same exceptions, same call when nothing is recorded.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from fulltilt.recorder.marks import Activity
from fulltilt.recorder.recorder import Recorder

Function = Callable[..., Any]


class Patches:
    """What has been put in place of something else, and how to undo it."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def swap(
        self, home: Any, name: str, make: Callable[[Function], Function], unless: Callable[[], bool] = lambda: False
    ) -> None:
        """Put ``make(original)`` in the place of ``home.name``; for pickle, also where a function was defined.

        The original comes back later, ``unless`` that is true by then, or the script has put its own there.
        """
        original = getattr(home, name)
        replacement: Any = functools.wraps(original)(make(original))
        homes = [home]
        if isinstance(home, type):
            replacement.__module__, replacement.__qualname__ = home.__module__, f"{home.__qualname__}.{name}"
        else:
            defined = sys.modules.get(getattr(original, "__module__", None) or "")
            homes += [defined] if defined is not home and getattr(defined, name, None) is original else []
        for each in homes:
            own = name in vars(each)
            setattr(each, name, replacement)
            self._undo.append(functools.partial(_put_back, each, name, replacement, original if own else None, unless))

    def around(self, home: Any, name: str, call: Callable[..., Any]) -> None:
        """Replace ``home.name`` by ``call(original, ...)``. That costs a call, so not for what runs in each step."""
        self.swap(home, name, lambda original: lambda *args, **kwargs: call(original, *args, **kwargs))

    def swap_subclasses(self, base: Any, except_: str | None = None, **makes: Callable[[Function], Function]) -> None:
        """Swap these functions in a class (not ``except_``) and in derived classes, also later ones, with their own."""

        def swap_own(kind: Any) -> None:
            for name in makes.keys() & vars(kind).keys():
                if kind is not base or name != except_:
                    self.swap(kind, name, makes[name])

        def all_of(kind: Any) -> None:
            swap_own(kind)
            for derived in kind.__subclasses__():
                all_of(derived)

        def __init_subclass__(derived: Any, /, **kwargs: Any) -> None:  # noqa: N807
            super(base, derived).__init_subclass__(**kwargs)
            swap_own(derived)

        all_of(base)
        base.__init_subclass__ = hook = classmethod(__init_subclass__)
        self._undo.append(functools.partial(_put_back, base, "__init_subclass__", hook))

    def undo_by(self, undo: Callable[[], None]) -> None:
        """Add a function that undoes some other change."""
        self._undo.append(undo)

    def restore(self) -> None:
        """Put every original back."""
        while self._undo:
            self._undo.pop()()


def _put_back(
    home: Any, name: str, replacement: Any, original: Function | None = None, unless: Callable[[], bool] = lambda: False
) -> None:
    if vars(home).get(name) is not replacement or unless():
        return
    if original is None:  # it was inherited
        delattr(home, name)
    else:
        setattr(home, name, original)


def timed(recorder: Recorder, original: Function, activity: Activity) -> Function:
    """``original``, marked as ``activity`` while it runs on the training thread outside of any other activity."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not recorder.on_training_thread() or recorder.activity is not Activity.USER:
            return original(*args, **kwargs)
        before = recorder.switch(activity)
        try:
            return original(*args, **kwargs)
        finally:
            recorder.switch(before)

    return call
