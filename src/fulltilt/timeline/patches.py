"""Every place where Fulltilt stands in torch's way: which entry point, what is noted there, and how it is put back.

| entry point                         | noted                                          |
|-------------------------------------|------------------------------------------------|
| utils.data.DataLoader.__init__      | where it was called, what was written there    |
| utils.data.DataLoader.__iter__      | every batch, through the tap                   |
| autograd.backward, autograd.grad    | backward                                       |
| optim (global step hooks)           | steps                                          |
| amp.GradScaler.step                 | steps that the scaler skipped                  |
| amp.autocast.__enter__              | the precision in force                         |
| save                                | checkpoints                                    |
| nn.Module.train                     | evaluation mode of the trained model           |
| Tensor.to, .cuda                    | copies to the GPU                              |
| Tensor.item, .tolist, .cpu, bool(), | waits for the GPU                              |
| float(), int(), .nonzero            |                                                |
| cuda.synchronize                    | waits for the GPU                              |
| distributed.all_reduce, …           | explicit collectives                           |
| nn.parallel.DistributedDataParallel | the replica, for its own timings               |

Everything behaves as before for the caller: same values, same exceptions, same call when nothing is recorded.
"""

from __future__ import annotations

import functools
import importlib
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

from fulltilt.records import MemoryRecord
from fulltilt.timeline.loader_tap import LoaderTaps, given_arguments
from fulltilt.timeline.marks import Activity, BackwardBegan, BackwardEnded, EvalMode, OptimizerStepped, Point
from fulltilt.timeline.memory_parts import memory_parts
from fulltilt.timeline.recorder import Recorder
from fulltilt.timeline.stacks import users_line

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
)
# Methods of a tensor whose answer the host has to wait for, as a user writes them.
READS = {
    "item": ".item()",
    "tolist": ".tolist()",
    "cpu": ".cpu()",
    "nonzero": ".nonzero()",
    "__bool__": "bool()",
    "__float__": "float()",
    "__int__": "int()",
}
ASK_PINNED_FIRST = 8
ASK_PINNED_EVERY = 64
ASK_REPLICAS_EVERY = 16
# An early step, but not the first: some optimizers make their states later.
ASK_MEMORY_AT = 3
# A copy that took the host longer than this did not merely queue itself.
BLOCKED_S = 0.0002
LARGE_COPY_BYTES = 1 << 20


class Patches:
    """The patches of one recorder. ``install`` puts them in place, ``restore`` takes them out again."""

    def __init__(self, torch: Any, recorder: Recorder, taps: LoaderTaps) -> None:
        self._torch = torch
        self._recorder = recorder
        self._taps = taps
        self._notes = recorder.notes
        self._undo: list[Callable[[], None]] = []
        self._stepping: list[int] = []
        self._steps_count: set[int] = set()
        self._depth_of_train = 0
        self._trained: set[int] = set()
        self._known: list[weakref.ref[Any]] = []
        self._copies_seen = 0
        self.watches_copies = False

    def install(self) -> None:
        """Put all patches in place."""
        torch = self._torch
        self._exchange(torch.utils.data.DataLoader, "__init__", self._loader_init)
        self._exchange(torch.utils.data.DataLoader, "__iter__", self._loader_iter)
        self._exchange(torch.autograd, "backward", self._backward)
        self._exchange(torch.autograd, "grad", self._grad)
        self._exchange(torch.amp.grad_scaler.GradScaler, "step", self._scaler_step)
        self._exchange(torch.amp.autocast_mode.autocast, "__enter__", self._autocast)
        self._exchange(torch, "save", self._save)
        self._exchange(torch.nn.Module, "train", self._train)
        # torchvision keeps a set of these very functions from the moment it is imported: then they must stay.
        self.watches_copies = "torchvision.tv_tensors" not in sys.modules
        if self.watches_copies:
            for name in ("to", "cuda"):
                self._exchange(torch.Tensor, name, self._copy)
        for name, written in READS.items():
            self._exchange(torch.Tensor, name, functools.partial(self._read, written))
        self._exchange(torch.cuda, "synchronize", self._synchronize)
        self._exchange(torch.nn.parallel.DistributedDataParallel, "__init__", self._replica_init)
        if torch.distributed.is_available():
            for name in COLLECTIVES:
                if hasattr(torch.distributed, name):
                    self._exchange(torch.distributed, name, self._collective)
        hooks = importlib.import_module(torch.optim.Optimizer.__module__)
        for handle in (
            hooks.register_optimizer_step_pre_hook(self._before_step),
            hooks.register_optimizer_step_post_hook(self._after_step),
        ):
            self._undo.append(handle.remove)

    def restore(self) -> None:
        """Put every original back."""
        while self._undo:
            self._undo.pop()()

    def _exchange(self, home: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        own = name in vars(home)
        original = getattr(home, name)
        setattr(home, name, functools.wraps(original)(make(original)))
        self._undo.append(lambda: setattr(home, name, original) if own else delattr(home, name))

    # ------------------------------------------------------------------ data

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

    # ------------------------------------------------------------------ backward and steps

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self._recorder

        def backward(*args: Any, **kwargs: Any) -> Any:
            if not recorder.active or recorder.activity is Activity.BACKWARD or recorder.rest.on:
                return original(*args, **kwargs)
            if not recorder.mine():
                if recorder.notes.steps:
                    return original(*args, **kwargs)
                recorder.adopt()
            recorder.ensure_started()
            recorder.training = True
            recorder.eval_mode = self._taps.was_evaluating = False
            self._taps.trained()
            before = recorder.switch(Activity.BACKWARD, BackwardBegan(), Point.BACKWARD)
            recorder.calibrate_if_asked(Point.BACKWARD)
            try:
                return original(*args, **kwargs)
            finally:
                recorder.switch(before, BackwardEnded())

        return backward

    def _grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return self._timed(original, Activity.BACKWARD)

    def _timed(self, original: Callable[..., Any], activity: Activity) -> Callable[..., Any]:
        recorder = self._recorder

        def timed(*args: Any, **kwargs: Any) -> Any:
            if not recorder.mine() or recorder.activity is not Activity.USER:
                return original(*args, **kwargs)
            before = recorder.switch(activity)
            try:
                return original(*args, **kwargs)
            finally:
                recorder.switch(before)

        return timed

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder = self._recorder
        if not recorder.active or recorder.rest.on or self._torch.compiler.is_compiling():
            return
        if not recorder.mine():
            if recorder.notes.steps:
                return
            recorder.adopt()
        key = id(optimizer)
        if key not in self._notes.optimizers:
            self._meet(optimizer)
        if key in self._stepping:
            self._stepping.clear()  # the last step of this optimizer ended in an exception
        self._stepping.append(key)
        # A closure holds the whole step (LBFGS, Lightning): its code is the user's, and only looks can tell it apart.
        if len(self._stepping) == 1 and not any(callable(given) for given in (*args[1:], *kwargs.values())):
            recorder.switch(Activity.OPTIMIZER)

    def _after_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        recorder = self._recorder
        if recorder.rest.on and recorder.mine():
            if id(optimizer) in self._steps_count:
                recorder.stepped_at_rest()
            return
        if not recorder.mine() or id(optimizer) not in self._stepping or self._torch.compiler.is_compiling():
            return
        while self._stepping and self._stepping.pop() != id(optimizer):
            pass
        if self._stepping:
            return  # an optimizer inside another one: the outer one's step is the step
        self._stepped(id(optimizer), skipped=False)

    def _stepped(self, key: int, skipped: bool) -> None:
        recorder = self._recorder
        self._notes.optimizer_calls += 1
        self._steps_count.add(key)
        recorder.calibrating = False
        recorder.switch(Activity.USER, OptimizerStepped(key, skipped), Point.STEP)
        if not recorder.notes.taps or not recorder.notes.taps.all:
            recorder.calibrate_if_asked(Point.BATCH)
        if self._notes.replicas and self._notes.optimizer_calls % ASK_REPLICAS_EVERY == 0:
            self._notes.read_communication()
        if self._notes.memory is None and self._notes.optimizer_calls >= ASK_MEMORY_AT:
            self._weigh()
        recorder.stepped()

    def _weigh(self) -> None:
        """Ask for the memory by part at the end of a step, when the gradients still lie there."""
        known = [optimizer for reference in self._known if (optimizer := reference()) is not None]
        try:
            self._notes.memory = memory_parts(self._torch, known, self._recorder.clock is not None)
        except Exception as error:  # an optimizer of another shape is no reason to stop anybody's training
            self._notes.memory = MemoryRecord(0, 0, 0, 0)
            self._notes.remark(f"memory by part: {type(error).__name__}: {error}")

    def _meet(self, optimizer: Any) -> None:
        """The first step of an optimizer: note what it trains and on which device."""
        self._recorder.ensure_started()
        self._notes.learn_rank()
        self._notes.optimizers[id(optimizer)] = type(optimizer).__name__
        self._known.append(weakref.ref(optimizer))
        groups = optimizer.param_groups
        self._notes.learning_rate = _number(groups[0].get("lr")) if groups else None
        parameters = [parameter for group in groups for parameter in group["params"]]
        self._trained.update(id(parameter) for parameter in parameters)
        if parameters:
            self._notes.parameter_dtype = str(parameters[0].dtype).removeprefix("torch.")
            if parameters[0].is_cuda:
                self._recorder.trains_on_gpu(self._torch)

    def _scaler_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder, notes = self._recorder, self._notes

        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not recorder.mine() or not scaler.is_enabled():
                return original(scaler, optimizer, *args, **kwargs)
            recorder.wake()
            notes.scaler = True
            calls = notes.optimizer_calls
            before = recorder.switch(Activity.OPTIMIZER)
            try:
                return original(scaler, optimizer, *args, **kwargs)
            finally:
                if notes.optimizer_calls == calls and recorder.mine():
                    inner = getattr(optimizer, "optimizer", optimizer)
                    self._stepped(id(inner), skipped=True)
                else:
                    recorder.switch(before)

        return step

    def _autocast(self, original: Callable[..., Any]) -> Callable[..., Any]:
        notes = self._notes

        def __enter__(context: Any) -> Any:  # noqa: N807
            if notes.autocast is None and getattr(context, "_enabled", False):
                notes.autocast = str(getattr(context, "fast_dtype", "")).removeprefix("torch.") or None
            return original(context)

        return __enter__

    # ------------------------------------------------------------------ saving and evaluating

    def _save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder, notes = self._recorder, self._notes

        def save(*args: Any, **kwargs: Any) -> Any:
            if not recorder.mine() or recorder.activity is Activity.SAVE:
                return original(*args, **kwargs)
            recorder.wake()
            where, function = users_line(recorder.way_in.spots)
            began = time.perf_counter()
            before = recorder.switch(Activity.SAVE)
            try:
                return original(*args, **kwargs)
            finally:
                recorder.switch(before)
                notes.checkpoint_lines.charge(where, function, time.perf_counter() - began, "torch.save")

        return save

    def _train(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self._recorder

        def train(module: Any, mode: bool = True) -> Any:
            if not recorder.mine() or self._depth_of_train:
                return original(module, mode)
            self._depth_of_train += 1
            try:
                return original(module, mode)
            finally:
                self._depth_of_train -= 1
                if recorder.eval_mode == bool(mode) and self._is_trained(module):
                    recorder.wake()
                    recorder.eval_mode = not mode
                    self._taps.was_evaluating = recorder.eval_mode
                    recorder.switch(recorder.activity, EvalMode(not mode), Point.EVAL)

        return train

    def _is_trained(self, module: Any) -> bool:
        parameter = next((p for p in module.parameters() if p.requires_grad), None)
        return parameter is not None and id(parameter) in self._trained

    # ------------------------------------------------------------------ host and GPU

    def _copy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder, copies, torch = self._recorder, self._notes.copies, self._torch

        def copy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.clock is None or recorder.rest.on or torch.compiler.is_compiling():
                return original(tensor, *args, **kwargs)
            if tensor.is_cuda or not recorder.mine() or recorder.activity is not Activity.USER:
                return original(tensor, *args, **kwargs)
            before = recorder.switch(Activity.COPY)
            began = time.perf_counter()
            moved = False
            try:
                result = original(tensor, *args, **kwargs)
                moved = bool(result.is_cuda)
                return result
            finally:
                took = time.perf_counter() - began
                worth_an_event = moved and (took > BLOCKED_S or tensor.nbytes >= LARGE_COPY_BYTES)
                recorder.switch(before, None, Point.COPY if worth_an_event else Point.NONE)
                if moved:
                    blocking = not (kwargs.get("non_blocking") or (len(args) > 1 and args[1] is True))
                    copies.add(tensor.nbytes, took, blocking, recorder.rest.stands_for)
                    self._copies_seen += 1
                    if self._copies_seen <= ASK_PINNED_FIRST or self._copies_seen % ASK_PINNED_EVERY == 0:
                        copies.asked += 1
                        copies.pageable += not tensor.is_pinned()
                    if worth_an_event:
                        copies.lines.charge(*users_line(recorder.way_in.spots), took)
                    if recorder.calibrating and took > BLOCKED_S:
                        recorder.lost_its_lead()

        return copy

    def _read(self, written: str, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder, torch = self._recorder, self._torch

        def read(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.clock is None or recorder.rest.on or torch.compiler.is_compiling():
                return original(tensor, *args, **kwargs)
            if not tensor.is_cuda or not recorder.mine():
                return original(tensor, *args, **kwargs)
            return self._blocked(original, written, tensor, *args, **kwargs)

        return read

    def _synchronize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self._recorder

        def synchronize(*args: Any, **kwargs: Any) -> Any:
            if recorder.clock is None or recorder.rest.on or not recorder.mine():
                return original(*args, **kwargs)
            return self._blocked(original, "torch.cuda.synchronize()", *args, **kwargs)

        return synchronize

    def _blocked(self, original: Callable[..., Any], call: str, *args: Any, **kwargs: Any) -> Any:
        """A call that waits for the GPU."""
        recorder, notes = self._recorder, self._notes
        if recorder.activity is Activity.SYNC:
            return original(*args, **kwargs)
        before = recorder.switch(Activity.SYNC, None, Point.SYNCED if recorder.calibrating else Point.NONE)
        began = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            recorder.switch(before)
            took = time.perf_counter() - began
            if before is not Activity.SAVE:
                line = users_line(recorder.way_in.spots)
                notes.waited_for_gpu(*line, call, took, recorder.rest.stands_for)
            if recorder.calibrating:
                recorder.lost_its_lead()

    # ------------------------------------------------------------------ several processes

    def _collective(self, original: Callable[..., Any]) -> Callable[..., Any]:
        timed = self._timed(original, Activity.COMM)

        def collective(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if kwargs.get("async_op") else timed(*args, **kwargs)

        return collective

    def _replica_init(self, original: Callable[..., None]) -> Callable[..., None]:
        def __init__(replica: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(replica, *args, **kwargs)
            if self._recorder.active:
                self._notes.replicas.append(weakref.ref(replica))
                if replica.device_type == "cpu":
                    # Its default, every 100th step, is right for a GPU, where reading the timers costs a wait.
                    replica._set_ddp_runtime_logging_sample_rate(10)

        return __init__


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
