"""Inside a trial: its settings are put in force, blocks of steps timed, losses kept; it ends when the rate is known.

The process ends at a step boundary without running on: no end-of-training code of the user's, no exit handlers.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import itertools
import math
import multiprocessing
import os
import random
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fulltilt import store
from fulltilt.recorder.hooks import Patches
from fulltilt.recorder.hooks.dataloader import override_fastai
from fulltilt.recorder.loaders import LoaderRegistry, LoaderStats, call_sites
from fulltilt.recorder.loaders.loader_stats import length_of
from fulltilt.recorder.loaders.settings_file import LoaderOverride, looks_like_training
from fulltilt.recorder.session import Session
from fulltilt.recorder.steps import BACKWARDS_WITHOUT_OPTIMIZER
from fulltilt.records import LoaderRecord, Settings
from fulltilt.tuning.trial.throughput import (
    ANSWER_FILE,
    ASSIGNMENT,
    Answer,
    Assignment,
    BlockTimer,
    StepBlock,
    StepSnapshot,
    block_between,
    is_enough,
    ready_batches,
)

# Losses of so many first steps are compared between trials.
MOST_LOSSES = 400
# The module, the function that saves, and the name of the path, which is its second argument.
SAVERS = (
    ("torch", "save", "f"),
    ("safetensors.torch", "save_file", "filename"),
    ("safetensors.torch", "save_model", "filename"),
    ("transformers.modeling_utils", "PreTrainedModel.save_pretrained", "save_directory"),
    ("transformers.tokenization_utils_base", "PreTrainedTokenizerBase.save_pretrained", "save_directory"),
)


def attach(session: Session) -> None:
    """Called by the recorder in each process of a trial that has imported torch."""
    if path := os.environ.get(ASSIGNMENT):
        TrialMeasurement(session, sys.modules["torch"], store.read_record(Path(path), Assignment)).install()


class TrialMeasurement:
    """One trial from its first step to its end."""

    def __init__(self, session: Session, torch: Any, assignment: Assignment) -> None:
        self._session = session
        self._torch = torch
        self._assignment = assignment
        self._saves = Saves(assignment.scratch)
        self._applied = AppliedSettings(assignment.settings, assignment.loader)
        self._pid = os.getpid()
        self._optimizer: int | None = None
        self._cuda = False
        self._steps = self._backwards = 0
        self._timer = BlockTimer(assignment.patience.block_s, self._timed)
        self._sources: dict[int, weakref.ref[Any]] = {}
        self._pending: list[tuple[StepSnapshot, StepSnapshot]] = []
        self._blocks: list[StepBlock] = []
        self._loss: Any = None
        self._losses: list[Any] = []
        self._answered = False

    def install(self) -> None:
        """Put the settings in force and begin to watch for steps."""
        # The same in every trial of a script that does not seed, so that losses can be compared.
        random.seed(0)
        self._torch.manual_seed(0)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(0)
        self._saves.install()
        self._applied.install(self._torch, self._session.loaders)
        sys.modules[self._torch.optim.Optimizer.__module__].register_optimizer_step_post_hook(self._stepped)
        self._keep_losses()
        self._session.loaders.live = self._begin_pass
        atexit.register(self._script_ended)
        sys.excepthook = functools.partial(self._script_failed, sys.excepthook)

    # ------------------------------------------------------------------ losses

    def _keep_losses(self) -> None:
        torch = self._torch
        unscaled: dict[int, Any] = {}

        def scaling(scale: Callable[..., Any]) -> Callable[..., Any]:
            def scaled(scaler: Any, outputs: Any) -> Any:
                result = scale(scaler, outputs)
                unscaled.clear()
                unscaled[id(result)] = outputs
                return result

            return scaled

        def keeping(backward: Callable[..., Any]) -> Callable[..., Any]:
            def kept(tensors: Any, *args: Any, **kwargs: Any) -> Any:
                loss = unscaled.pop(id(tensors), tensors)
                if isinstance(loss, torch.Tensor) and loss.numel() == 1 and len(self._losses) < MOST_LOSSES:
                    self._loss = loss.detach().clone()  # a captured graph would overwrite its output
                result = backward(tensors, *args, **kwargs)
                self._went_backward(loss)
                return result

            return kept

        Patches().swap(torch.amp.grad_scaler.GradScaler, "scale", scaling)
        Patches().swap(torch.autograd, "backward", keeping)

    # ------------------------------------------------------------------ steps

    def _went_backward(self, loss: Any) -> None:
        """Where no optimizer of torch's steps, as with fastai's own or updates by hand, each backward is a step."""
        if self._optimizer is not None or os.getpid() != self._pid or not self._session.recorder.on_training_thread():
            return
        self._backwards += 1
        if self._backwards >= BACKWARDS_WITHOUT_OPTIMIZER:
            self._cuda = bool(getattr(loss, "is_cuda", False))
            self._count_step()

    def _stepped(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if os.getpid() != self._pid or not self._session.recorder.on_training_thread():
            return
        if self._optimizer is None:
            self._optimizer = id(optimizer)
            self._cuda = any(p.is_cuda for group in optimizer.param_groups for p in group["params"])
            self._saves.install()  # what was imported since
        if id(optimizer) == self._optimizer:
            self._count_step()

    def _count_step(self) -> None:
        self._steps += 1
        if len(self._losses) < MOST_LOSSES and self._loss is not None:
            self._losses.append(self._loss)
            self._loss = None
        block = self._timer.stepped(self._snapshot()) if self._session.state.rank == 0 else None
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

    def _begin_pass(self, loader: Any, tap: LoaderStats, iterate: Callable[[Any], Any]) -> Any:
        """Stands where live tuning would: a pass begins with torch's own iterator, which can be asked for its queue."""
        source = self._session.loaders.start_workers(functools.partial(iterate, loader), tap)
        with contextlib.suppress(TypeError):
            self._sources[tap.loader_id] = weakref.ref(source)
        return source

    def _snapshot(self) -> StepSnapshot:
        loaders = self._session.loaders.all
        trained = [tap for tap in loaders if tap.batches > tap.eval_batches]
        sources = (self._sources.get(tap.loader_id, lambda: None)() for tap in trained)
        return StepSnapshot(
            host_s=time.perf_counter(),
            steps=self._steps,
            batches=sum(tap.batches for tap in trained),
            samples=sum(tap.samples if tap.counted else tap.batches for tap in trained),
            wait_s=sum(tap.wait_s for tap in trained),
            interruptions=sum(tap.eval_batches for tap in loaders) + self._saves.count,
            workers=sum(_workers(tap) for tap in trained),
            queue_batches=sum(_workers(tap) * int(tap.described.get("prefetch_factor") or 2) for tap in trained),
            ready=sum(ready_batches(source) for source in sources),
        )

    def _timed(self, moment: StepSnapshot) -> StepSnapshot:
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
        if os.getpid() == self._pid and self._steps and self._session.state.rank == 0:
            self._answer(complete=False)

    def _answer(self, complete: bool) -> None:
        if self._answered:
            return
        self._answered = True
        self._settle(wait=True)
        statistics = self._torch.cuda.memory_stats() if self._cuda else {}
        losses = tuple(itertools.takewhile(math.isfinite, map(float, self._losses)))
        answer = Answer(
            blocks=tuple(self._blocks),
            steps=self._steps,
            losses=losses,
            not_finite_at=len(losses) if len(losses) < len(self._losses) else None,
            complete=complete,
            out_of_memory=int(statistics.get("num_ooms", 0)),
            remarks=tuple(dict.fromkeys(self._applied.remarks)),
        )
        store.write_json(Path(self._assignment.folder) / ANSWER_FILE, answer)


def _workers(tap: LoaderStats) -> int:
    return int(tap.described.get("num_workers") or 0)


# --------------------------------------------------------------------------- checkpoints


class Saves:
    """Counts the checkpoints that a job saves, which take a moment, and points them into ``scratch`` where given."""

    def __init__(self, scratch: str | None) -> None:
        self.count = 0
        self._scratch = scratch
        self._installed: set[str] = set()

    def install(self) -> None:
        """Stand around the functions that save, in the modules that are imported by now."""
        for module, name, keyword in SAVERS:
            if module in sys.modules and f"{module}.{name}" not in self._installed:
                self._installed.add(f"{module}.{name}")
                *outer, last = name.split(".")
                home: Any = sys.modules[module]
                for part in outer:
                    home = getattr(home, part, None)
                if hasattr(home, last):
                    Patches().swap(home, last, functools.partial(self._saving, keyword))
        if self._scratch is not None and "torch.load" not in self._installed:
            self._installed.add("torch.load")
            Patches().swap(sys.modules["torch"], "load", self._loading)

    def _in_scratch(self, path: Any) -> str:
        return f"{self._scratch}{Path(path).absolute()}"

    def _saving(self, keyword: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def save(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            given = kwargs.get(keyword, args[1] if len(args) > 1 else None)
            if self._scratch is None or not isinstance(given, str | os.PathLike):
                return original(*args, **kwargs)
            target = self._in_scratch(given)
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            if keyword in kwargs:
                return original(*args, **{**kwargs, keyword: target})
            return original(args[0], target, *args[2:], **kwargs)

        return save

    def _loading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load(f: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(f, str | os.PathLike) and Path(self._in_scratch(f)).exists():
                f = self._in_scratch(f)
            return original(f, *args, **kwargs)

        return load


# --------------------------------------------------------------------------- settings put in force
# Loader settings go into the arguments of the training loader. Precision and compilation, which a script writes into
# its loop, are put around it from outside: well enough to measure them, not meant for a real run. Accumulation is not:
# its parts are measured with an optimizer step each, which costs a little more and needs the same memory.


class AppliedSettings(LoaderOverride):
    """Puts a trial's settings in force as the script constructs what they concern."""

    def __init__(self, settings: Settings, loader: LoaderRecord | None) -> None:
        super().__init__(settings)
        self._loader = loader
        self.remarks: list[str] = []

    def install(self, torch: Any, loaders: LoaderRegistry) -> None:
        """Stand in the way of what the settings concern, and of nothing else."""
        loaders.override = self
        override_fastai(Patches(), self._settings)
        if self._settings.precision is not None:
            _compute_in(torch, self._settings.precision)
        if self._settings.compile:
            _compile_first_trained(torch)

    def is_for(self, loader: Any, given: dict[str, Any]) -> bool:
        """Whether it is the loader that is studied; before it is known, whether it looks like one that trains."""
        wanted = self._loader
        if wanted is None or wanted.where is None:
            return looks_like_training(given)
        sites = call_sites(loader)
        if sites.where != wanted.where or length_of(given.get("dataset")) != wanted.dataset_len:
            return False
        # A library makes all its loaders at the same line of the user's.
        return sites.made_by is None or looks_like_training(given)

    def changed(self, given: dict[str, Any]) -> dict[str, Any]:
        """The loader's arguments with the settings in force, the batch size among them."""
        changed = super().changed(given)
        batch_size = self._settings.batch_size
        if batch_size is None:
            return changed
        if given.get("batch_sampler") is not None:
            # A library makes its loader around the sampler of one that was changed already, or it is the user's own.
            if getattr(given["batch_sampler"], "batch_size", None) != batch_size:
                self.remarks.append("the loader draws through a batch_sampler, whose batch size is its own")
        elif given.get("batch_size", 1) is None:
            self.remarks.append("the data set makes its batches itself (batch_size=None)")
        else:
            changed["batch_size"] = batch_size
        return changed


def _compute_in(torch: Any, precision: str) -> None:
    if precision == "tf32":
        torch.set_float32_matmul_precision("high")
        return
    torch.autocast("cuda" if torch.cuda.is_available() else "cpu", dtype=torch.bfloat16).__enter__()
    # Autocast keeps its copies of the weights until it ends; here it never ends, and each step changes them.
    optimizers: Any = inspect.getmodule(torch.optim.Optimizer)
    optimizers.register_optimizer_step_post_hook(lambda *_: torch.clear_autocast_cache())


def _compile_first_trained(torch: Any) -> None:
    """Compile the first module that is called with parameters to train: the model, before its parts."""

    def first_call(module: Any, _inputs: Any) -> None:
        if module.training and any(parameter.requires_grad for parameter in module.parameters()):
            handle.remove()
            module.compile()

    handle = torch.nn.modules.module.register_module_forward_pre_hook(first_call)
