"""What a training loop may tell the recorder itself, where its word is better than what can be seen from outside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TypeVar

from fulltilt.recorder.marks import Activity, EpochBegan, EvalMode, Point
from fulltilt.recorder.recorder import Recorder
from fulltilt.recorder.session import Session
from fulltilt.recorder.tapped import TappedIterable

Item = TypeVar("Item")


class LoopMarks:
    """Marks of a loop. Without a session, and on a thread that does not train, they do nothing."""

    def __init__(self, session: Session | None = None) -> None:
        self._session = session

    def loader(self, batches: Iterable[Item]) -> Iterable[Item]:
        """The same batches, measured. A DataLoader is measured anyway; this also takes any other iterable."""
        import torch

        session = self._session
        if session is None or isinstance(batches, torch.utils.data.DataLoader):
            return batches
        return TappedIterable(session.taps, batches)

    @contextlib.contextmanager
    def validation(self) -> Iterator[None]:
        """What happens inside is evaluation."""
        self.mark_validation(True)
        try:
            yield
        finally:
            self.mark_validation(False)

    @contextlib.contextmanager
    def checkpoint(self) -> Iterator[None]:
        """What happens inside is saving."""
        self.mark_checkpoint(True)
        try:
            yield
        finally:
            self.mark_checkpoint(False)

    def transfer(self) -> contextlib.AbstractContextManager[None]:
        """What happens inside is the copy of a batch to the GPU; noted where Tensor.to could not be watched."""
        session = self._session
        if session is None or session.recorder.clock is None or session.patches.watches_copies:
            return _NOTHING
        return _During(session.recorder, Activity.COPY, Point.COPY)

    def communication(self) -> contextlib.AbstractContextManager[None]:
        """What happens inside is waiting for other ranks."""
        return _NOTHING if self._session is None else _During(self._session.recorder, Activity.COMM, Point.NONE)

    def mark_validation(self, on: bool) -> None:
        """Evaluation begins or ends here. Saying so twice does no harm."""
        recorder = self._on_training_thread()
        if recorder is None:
            return
        recorder.evaluation.declare(on)
        if recorder.eval_mode != on:
            recorder.eval_mode = on
            recorder.switch(recorder.activity, EvalMode(on), Point.EVAL)

    def mark_checkpoint(self, on: bool) -> None:
        """Saving begins or ends here. Saying so twice does no harm."""
        recorder = self._on_training_thread()
        if recorder is not None and (recorder.activity is Activity.SAVE) != on:
            recorder.switch(Activity.SAVE if on else Activity.USER)

    def mark_epoch(self, number: int) -> None:
        """The epoch with this number begins."""
        recorder = self._on_training_thread()
        if recorder is not None:
            recorder.note(EpochBegan(number))

    def mark_profiling(self, on: bool) -> None:
        """The job is under a profiler of its own from here, or no longer: no delays are queued meanwhile."""
        recorder = self._on_training_thread()
        if recorder is not None:
            recorder.profiling = on

    def _on_training_thread(self) -> Recorder | None:
        recorder = self._session.recorder if self._session is not None else None
        if recorder is None or not recorder.mine():
            return None
        recorder.wake()
        return recorder


_NOTHING = contextlib.nullcontext()


class _During(contextlib.AbstractContextManager[None]):
    """An activity inside a step. It is on the path of every step, so it neither wakes the recorder nor nests."""

    def __init__(self, recorder: Recorder, activity: Activity, end: Point) -> None:
        self._recorder, self._activity, self._end = recorder, activity, end
        self._on = False

    def __enter__(self) -> None:
        recorder = self._recorder
        self._on = recorder.mine() and recorder.activity is Activity.USER
        if self._on:
            recorder.switch(self._activity)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._on:
            self._recorder.switch(Activity.USER, None, self._end)
