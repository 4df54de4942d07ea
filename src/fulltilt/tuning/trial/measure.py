"""Inside a trial: applies its settings, times blocks of steps, keeps losses, and exits when the rate is known.

The process exits after a step, without the user's end-of-training code and without exit handlers.
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
from fulltilt.recorder.hooks.training import trainable
from fulltilt.recorder.loaders import LoaderRegistry, LoaderStats, call_sites
from fulltilt.recorder.loaders.loader_stats import length_of, stored
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

# The losses of this many first steps are compared between trials.
MOST_LOSSES = 400
# (module, function that saves, name of its second argument, the path)
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
        self._unscaled: dict[int, Any] = {}
        self._losses: list[Any] = []
        self._answered = False

    def install(self) -> None:
        """Apply the settings and begin to count steps."""
        # For scripts that do not seed: the losses of trials can then be compared.
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
        patches, torch = Patches(), self._torch
        patches.around(torch.amp.grad_scaler.GradScaler, "scale", self._scale)
        patches.swap(torch.autograd, "backward", lambda backward: functools.partial(self._backward, backward))

    def _scale(self, scale: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        result = scale(scaler, outputs)
        self._unscaled = {id(result): outputs}
        return result

    def _backward(self, backward: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        loss = self._unscaled.pop(id(tensors), tensors)
        if isinstance(loss, self._torch.Tensor) and loss.numel() == 1 and len(self._losses) < MOST_LOSSES:
            self._loss = loss.detach().clone()  # a captured graph would overwrite its output
        result = backward(tensors, *args, **kwargs)
        self._went_backward(loss)
        return result

    # ------------------------------------------------------------------ steps

    def _went_backward(self, loss: Any) -> None:
        """Where no torch optimizer steps (fastai's own, updates by hand), each backward counts as a step."""
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
        """Turn the blocks that the GPU has finished into figures."""
        while self._pending:
            began, ended = self._pending[0]
            if ended.event is not None and not ended.event.query():
                if not wait:
                    return
                ended.event.synchronize()
            self._pending.pop(0)
            self._blocks.append(block_between(began, ended))

    def _begin_pass(self, loader: Any, stats: LoaderStats, iterate: Callable[[Any], Any]) -> Any:
        """The hook of live tuning: keeps torch's own iterator of each pass, to ask for the length of its queue."""
        source = self._session.loaders.start_workers(functools.partial(iterate, loader), stats)
        with contextlib.suppress(TypeError):
            self._sources[stats.loader_id] = weakref.ref(source)
        return source

    def _snapshot(self) -> StepSnapshot:
        loaders = self._session.loaders.all
        trained = [stats for stats in loaders if stats.batches > stats.eval_batches]
        sources = (self._sources.get(stats.loader_id, lambda: None)() for stats in trained)
        return StepSnapshot(
            host_s=time.perf_counter(),
            steps=self._steps,
            batches=sum(stats.batches for stats in trained),
            samples=sum(stats.samples if stats.counted else stats.batches for stats in trained),
            wait_s=sum(stats.wait_s for stats in trained),
            interruptions=sum(stats.eval_batches for stats in loaders) + self._saves.count,
            workers=sum(_workers(stats) for stats in trained),
            queue_batches=sum(_workers(stats) * int(stats.described.get("prefetch_factor") or 2) for stats in trained),
            ready=sum(ready_batches(source) for source in sources),
        )

    def _timed(self, moment: StepSnapshot) -> StepSnapshot:
        if self._cuda and not self._torch.cuda.is_current_stream_capturing():
            moment.event = self._torch.cuda.Event(enable_timing=True)
            moment.event.record()
        return moment

    # ------------------------------------------------------------------ the end

    def _leave(self, status: int) -> None:
        """Exit at once and kill the loader's workers: torch would wait five seconds for busy ones."""
        self._session.finish()
        for process in multiprocessing.active_children():
            process.kill()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def _script_failed(self, show: Callable[..., None], *failure: Any) -> None:
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


def _workers(stats: LoaderStats) -> int:
    return int(stats.described.get("num_workers") or 0)


# --------------------------------------------------------------------------- checkpoints


class Saves:
    """Counts the checkpoints that a job saves, and redirects them into ``scratch`` where that is given."""

    def __init__(self, scratch: str | None) -> None:
        self.count = 0
        self.patches = Patches()
        self._scratch = scratch
        self._installed: set[str] = set()

    def install(self) -> None:
        """Patch the functions that save, in the modules imported so far."""
        for module, name, keyword in SAVERS:
            if module in sys.modules and f"{module}.{name}" not in self._installed:
                self._installed.add(f"{module}.{name}")
                *outer, last = name.split(".")
                home: Any = sys.modules[module]
                for part in outer:
                    home = getattr(home, part, None)
                if hasattr(home, last):
                    self.patches.around(home, last, functools.partial(self._save, keyword))
        if self._scratch is not None and "torch.load" not in self._installed:
            self._installed.add("torch.load")
            self.patches.around(sys.modules["torch"], "load", self._load)

    def _in_scratch(self, path: Any) -> str:
        return f"{self._scratch}{Path(path).absolute()}"

    def _save(self, keyword: str, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        given = kwargs.get(keyword, args[1] if len(args) > 1 else None)
        if self._scratch is None or not isinstance(given, str | os.PathLike):
            return original(*args, **kwargs)
        target = self._in_scratch(given)
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        if keyword in kwargs:
            return original(*args, **{**kwargs, keyword: target})
        return original(args[0], target, *args[2:], **kwargs)

    def _load(self, original: Callable[..., Any], f: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(f, str | os.PathLike) and Path(self._in_scratch(f)).exists():
            f = self._in_scratch(f)
        return original(f, *args, **kwargs)


# --------------------------------------------------------------------------- settings
# Loader settings go into the arguments of the training loader. Precision and compilation are applied from outside of
# the script's loop: enough to measure them, not meant for a real run. Accumulation is not applied: each part is
# measured with an optimizer step, which costs a little more and needs the same memory.


class AppliedSettings(LoaderOverride):
    """Applies a trial's settings while the script makes its loader and model."""

    def __init__(self, settings: Settings, loader: LoaderRecord | None) -> None:
        super().__init__(settings)
        self._loader = loader
        self.remarks: list[str] = []

    def install(self, torch: Any, loaders: LoaderRegistry) -> None:
        """Patch what the settings concern, and nothing else."""
        loaders.override = self
        override_fastai(Patches(), self._settings)
        if self._settings.precision is not None:
            _compute_in(torch, self._settings.precision)
        if self._settings.compile:
            _compile_first_trained(torch)

    def is_for(self, loader: Any, given: dict[str, Any]) -> bool:
        """Whether this is the studied loader; until that is known, whether it looks like a training loader."""
        wanted = self._loader
        if wanted is None or wanted.where is None:
            return looks_like_training(given)
        sites = call_sites(loader)
        length = length_of(given.get("dataset"))
        if sites.where != wanted.where or length not in (None, wanted.dataset_len):
            return False
        if length is None and wanted.shuffle and not looks_like_training(given):
            return False  # as many samples or not: nobody but torch asks the user's data set for its length
        # A library makes all of its loaders at the same line of the user's script.
        return sites.made_by is None or looks_like_training(given)

    def changed(self, given: dict[str, Any]) -> dict[str, Any]:
        """The loader's arguments with the settings and the batch size applied."""
        changed = super().changed(given)
        batch_size = self._settings.batch_size
        if batch_size is None:
            return changed
        if given.get("batch_sampler") is not None:
            # The user's own sampler, or that of a changed loader around which a library makes its own.
            if stored(given["batch_sampler"], "batch_size") != batch_size:
                self.remarks.append("the loader has a batch_sampler, which has its own batch size")
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
    # Autocast caches casts of the weights until it exits; it never exits here, and each step changes the weights.
    optimizers: Any = inspect.getmodule(torch.optim.Optimizer)
    optimizers.register_optimizer_step_post_hook(lambda *_: torch.clear_autocast_cache())


def _compile_first_trained(torch: Any) -> None:
    """Compile the first module called that has parameters to train: the model, before its submodules."""

    def first_call(module: Any, _inputs: Any) -> None:
        if module.training and trainable(module) is not None:
            handle.remove()
            module.compile()

    handle = torch.nn.modules.module.register_module_forward_pre_hook(first_call)
