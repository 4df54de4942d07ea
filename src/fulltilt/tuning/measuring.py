"""Inside a trial: blocks of steps are timed, losses are kept, and the process ends when the rate is known.

The process ends at a step boundary without running on: no end-of-training code of the user's, no exit handlers.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import math
import multiprocessing
import os
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fulltilt import store
from fulltilt.recorder.loader_tap import LoaderTap
from fulltilt.recorder.session import Session
from fulltilt.tuning import early
from fulltilt.tuning.assignment import ANSWER_FILE, Answer, Assignment
from fulltilt.tuning.changes import Changes
from fulltilt.tuning.company import Company
from fulltilt.tuning.drought import Drought
from fulltilt.tuning.interval import Block, is_enough
from fulltilt.tuning.moments import Moment, block_between
from fulltilt.tuning.overlap import Overlap
from fulltilt.tuning.pace import Pace
from fulltilt.tuning.ready import ready_batches
from fulltilt.tuning.saves import Saves

# Losses of so many first steps are compared between trials.
MOST_LOSSES = 400


class Measuring:
    """One trial from its first step to its end."""

    def __init__(self, session: Session, torch: Any, assignment: Assignment) -> None:
        self._session = session
        self._torch = torch
        self._assignment = assignment
        self._saves = early.taken_over() or Saves(Path(assignment.scratch))
        self._changes = Changes(torch, assignment.settings, assignment.loader)
        self._pid, self._parent = os.getpid(), os.getppid()
        self._optimizer: int | None = None
        self._cuda = False
        self._learning_rate: float | None = None
        self._steps = 0
        self._drought = Drought()
        self._pace = Pace(assignment.patience.block_s, self._timed)
        self._sources: dict[int, weakref.ref[Any]] = {}
        self._company = Company()
        self._overlap = Overlap()
        self._pending: list[tuple[Moment, Moment]] = []
        self._blocks: list[Block] = []
        self._loss: Any = None
        self._losses: list[Any] = []
        self._answered = False

    def install(self) -> None:
        """Put the settings in force and begin to watch for steps."""
        self._saves.install()
        self._saves.files.go_on_in(Path(self._assignment.scratch))
        self._changes.install()
        torch = self._torch
        sys.modules[torch.optim.Optimizer.__module__].register_optimizer_step_post_hook(self._stepped)
        self._keep_losses()
        self._session.taps.live = self._begin_pass
        atexit.register(self._script_ended)
        sys.excepthook = functools.partial(self._script_failed, sys.excepthook)

    # ------------------------------------------------------------------ losses

    def _keep_losses(self) -> None:
        torch = self._torch
        backward, scale = torch.autograd.backward, torch.amp.grad_scaler.GradScaler.scale
        unscaled: dict[int, Any] = {}

        @functools.wraps(scale)
        def scaling(scaler: Any, outputs: Any) -> Any:
            result = scale(scaler, outputs)
            unscaled.clear()
            unscaled[id(result)] = outputs
            return result

        @functools.wraps(backward)
        def keeping(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            loss = unscaled.pop(id(tensors), tensors)
            if isinstance(loss, torch.Tensor) and loss.numel() == 1 and len(self._losses) < MOST_LOSSES:
                self._loss = loss.detach().clone()  # a captured graph would overwrite its output
            return backward(tensors, *args, **kwargs)

        torch.amp.grad_scaler.GradScaler.scale = scaling
        torch.autograd.backward = keeping

    # ------------------------------------------------------------------ steps

    def _stepped(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if os.getpid() != self._pid or not self._session.recorder.mine():
            return
        if self._optimizer is None:
            self._optimizer = id(optimizer)
            self._learning_rate = _learning_rate(optimizer)
            self._cuda = any(p.is_cuda for group in optimizer.param_groups for p in group["params"])
        if id(optimizer) != self._optimizer:
            return
        self._steps += 1
        self._saves.files.trains = True
        if len(self._losses) < MOST_LOSSES and self._loss is not None:
            self._losses.append(self._loss)
            self._loss = None
        if os.getppid() != self._parent:
            os._exit(1)  # the study is gone
        if self._session.notes.rank == 0:
            self._advance()

    def _advance(self) -> None:
        now = self._moment()
        block = self._pace.stepped(now)
        if self._drought.lasts(now.host_s, now.steps, sum(tap.batches for tap in self._session.taps.all)):
            self._answer(complete=True)
            self._leave(0)
        if block is None:
            return
        self._pending.append(block)
        self._settle()
        if is_enough(self._blocks, self._assignment.patience):
            self._answer(complete=True)
            self._leave(0)

    def _settle(self, wait: bool = False) -> None:
        """Turn the blocks whose end the GPU has reached into figures."""
        while self._pending:
            began, ended = self._pending[0]
            if ended.event is not None and not ended.event.query():
                if not wait:
                    return
                ended.event.synchronize()
            self._pending.pop(0)
            self._blocks.append(block_between(began, ended))

    def _begin_pass(self, _loader: Any, tap: LoaderTap, start: Callable[[], Any]) -> Any:
        """Stands where live tuning would: a pass begins with torch's own iterator, which can be asked for its queue."""
        source = start()
        self._overlap.began(tap.loader_id, source)
        if hasattr(source, "_task_info"):
            self._sources[tap.loader_id] = weakref.ref(source)
        return source

    def _moment(self) -> Moment:
        taps = self._session.taps.all
        trained = self._company.after_step(taps)
        others = sum(tap.batches for tap in taps if tap not in trained)
        sources = (self._sources.get(tap.loader_id, lambda: None)() for tap in trained)
        return Moment(
            host_s=time.perf_counter(),
            steps=self._steps,
            batches=sum(tap.batches for tap in trained),
            samples=sum(tap.samples if tap.counted else tap.batches for tap in trained),
            wait_s=sum(tap.wait_s for tap in trained),
            interruptions=others + self._saves.saved,
            workers=sum(_workers(tap) for tap in trained),
            queue_batches=sum(_workers(tap) * int(tap.described.get("prefetch_factor") or 2) for tap in trained),
            ready=sum(ready_batches(source) for source in sources),
        )

    def _timed(self, moment: Moment) -> Moment:
        if self._cuda and not self._torch.cuda.is_current_stream_capturing():
            moment.event = self._torch.cuda.Event(enable_timing=True)
            moment.event.record()
        return moment

    # ------------------------------------------------------------------ the end

    def _leave(self, status: int) -> None:
        """Be gone at once, with the loader's workers: torch waits five seconds for those that still work."""
        self._session.finish()
        for process in multiprocessing.active_children():
            process.kill()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def _script_failed(self, show: Callable[..., None], *failure: Any) -> None:
        """An exception that nobody caught: shown as ever, then the end."""
        show(*failure)
        if os.getpid() == self._pid:
            self._script_ended()
            self._leave(1)

    def _script_ended(self) -> None:
        if os.getpid() == self._pid and self._steps and self._session.notes.rank == 0:
            self._answer(complete=False)

    def _answer(self, complete: bool) -> None:
        if self._answered:
            return
        self._answered = True
        self._settle(wait=True)
        statistics = self._torch.cuda.memory_stats() if self._cuda else {}
        losses = _finite(self._losses)
        answer = Answer(
            blocks=tuple(self._blocks),
            steps=self._steps,
            losses=losses,
            not_finite_at=len(losses) if len(losses) < len(self._losses) else None,
            learning_rate=self._learning_rate,
            world_size=self._session.notes.world_size,
            complete=complete,
            out_of_memory=int(statistics.get("num_ooms", 0)),
            remarks=self._remarks(),
            diverts=self._saves.diverted,
            passes_overlap=self._overlap.seen,
        )
        store.write_json(Path(self._assignment.folder) / ANSWER_FILE, answer)

    def _remarks(self) -> tuple[str, ...]:
        kept = (f"kept {path}" for path in self._saves.files.kept)
        return tuple(dict.fromkeys((*self._changes.remarks, *kept)))


def _workers(tap: LoaderTap) -> int:
    return int(tap.described.get("num_workers") or 0)


def _learning_rate(optimizer: Any) -> float | None:
    try:
        return float(optimizer.defaults.get("lr", optimizer.param_groups[0].get("lr")))
    except (TypeError, ValueError, IndexError):
        return None


def _finite(losses: list[Any]) -> tuple[float, ...]:
    """The losses as numbers, up to the first that is not one."""
    return tuple(itertools.takewhile(math.isfinite, (float(loss) for loss in losses)))
