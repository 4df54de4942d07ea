"""Where backward runs, optimizers step, checkpoints are saved and garbage is collected; and evaluation mode."""

from __future__ import annotations

import gc
import importlib
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from fulltilt.recorder.hooks import Function, Patches, timed
from fulltilt.recorder.loaders import LoaderRegistry
from fulltilt.recorder.marks import Activity, BackwardBegan, BackwardEnded, EvalMode, OptimizerStepped, Point
from fulltilt.recorder.rank_state import memory_parts
from fulltilt.recorder.recorder import Recorder
from fulltilt.recorder.stacks.frames import users_line
from fulltilt.recorder.validation import Generation
from fulltilt.records import MemoryRecord


def watch_saving(patches: Patches, torch: Any, recorder: Recorder) -> None:
    """Mark torch.save and name the line that calls it."""

    def save(original: Function, *args: Any, **kwargs: Any) -> Any:
        if not recorder.on_training_thread() or recorder.activity is Activity.CHECKPOINT:
            return original(*args, **kwargs)
        recorder.resume()
        where, function = users_line(recorder.loop_frames.spots)
        began = time.perf_counter()
        before = recorder.switch(Activity.CHECKPOINT)
        try:
            return original(*args, **kwargs)
        finally:
            recorder.switch(before)
            recorder.state.lines.saving.charge(where, function, time.perf_counter() - began, "torch.save")

    patches.around(torch, "save", save)


# A garbage collection is marked within these activities; within another one it is part of that one.
INTERRUPTED = frozenset({Activity.USER, Activity.BACKWARD, Activity.OPTIMIZER})
OLDEST = 2  # the generation whose collection walks through every object there is
# Before 3.11.8 and 3.12.2, Python code called by a collection within ast.literal_eval (numpy.load) lets other threads
# parse, and then one of them fails (gh-106905). There, only calls of gc.collect() are timed.
CALLBACKS_ARE_SAFE = sys.version_info >= (3, 11, 8) and sys.version_info[:3] not in ((3, 12, 0), (3, 12, 1))


def watch_garbage_collector(patches: Patches, recorder: Recorder) -> None:
    """Time the collections on the training thread; full ones are marked, and those by gc.collect() have its line."""
    totals, asked = recorder.state.garbage, [("", "")]
    began_ns, before = 0, Activity.USER

    def seen(phase: str, info: dict[str, int]) -> None:
        nonlocal began_ns, before
        if phase == "start":
            began_ns = time.perf_counter_ns()
            if info["generation"] == OLDEST and recorder.training and recorder.on_training_thread():
                before = recorder.activity
                if before in INTERRUPTED:
                    recorder.switch(Activity.GARBAGE_COLLECTION)
        elif recorder.training and recorder.on_training_thread():
            full = info["generation"] == OLDEST
            totals.add((time.perf_counter_ns() - began_ns) * 1e-9, full, *asked[-1])
            if full and recorder.activity is Activity.GARBAGE_COLLECTION:
                recorder.switch(before)

    def collect(original: Function, generation: int = OLDEST) -> int:
        asked.append(users_line(recorder.loop_frames.spots) if recorder.on_training_thread() else ("", ""))
        if not CALLBACKS_ARE_SAFE:
            seen("start", {"generation": generation})
        try:
            return int(original(generation))
        finally:
            if not CALLBACKS_ARE_SAFE:
                seen("stop", {"generation": generation})
            asked.pop()

    patches.around(gc, "collect", collect)
    if CALLBACKS_ARE_SAFE:
        gc.callbacks.append(seen)
        patches.undo_by(lambda: gc.callbacks.remove(seen) if seen in gc.callbacks else None)


# After these steps DistributedDataParallel is asked for its timings: early ones too, for short runs.
ASK_REPLICAS_EVERY, ASK_REPLICAS_EARLY = 16, (2, 4, 8)
# After gradients for so many batches without an optimizer or backward(), there will be none.
GRADIENTS_ALONE = 3
# An early step, but not the first: some optimizers make their states later.
ASK_MEMORY_AT = 3


@dataclass
class Captured:
    """The parts of a step that a CUDA graph holds."""

    backwards: int = 0
    optimizers: list[weakref.ref[Any]] = field(default_factory=list)


class StepHooks:
    """Marks backward, steps and evaluation mode."""

    def __init__(
        self, torch: Any, recorder: Recorder, loaders: LoaderRegistry, trains_on_gpu: Callable[[], None]
    ) -> None:
        self._torch = torch
        self._trains_on_gpu = trains_on_gpu
        self._recorder = recorder
        self._loaders = loaders
        self._state = recorder.state
        self._stepping: list[int] = []
        self._counting_optimizers: set[int] = set()
        self._depth_of_train = 0
        self._calls_backward = False
        self._drawn_before = self._alone = 0
        self._gradients_at: tuple[str, str] | None = None
        self._around_steps = Activity.USER  # backward, where its hooks step
        self._steps_inside = False  # optimizers step in hooks of backward
        self._trained: set[int] = set()
        self._generation = Generation()
        self._known: list[weakref.ref[Any]] = []
        self.capture: Captured | None = None  # while the training thread captures a CUDA graph

    def install(self, patches: Patches) -> None:
        """Patch backward, the optimizers' and the gradient scaler's step, autocast and train()."""
        torch = self._torch
        patches.swap(torch.autograd, "backward", self._backward)
        patches.swap(torch.autograd, "grad", self._grad)
        patches.swap(torch.amp.grad_scaler.GradScaler, "step", self._scaler_step)
        patches.swap(torch.amp.autocast_mode.autocast, "__enter__", self._autocast)
        patches.swap(torch.nn.Module, "train", self._train)
        for context in (torch.no_grad, torch.inference_mode):
            patches.swap(context, "__enter__", self._gradients_off)
            patches.swap(context, "__exit__", self._gradients_on)
        hooks = importlib.import_module(torch.optim.Optimizer.__module__)
        for handle in (
            hooks.register_optimizer_step_pre_hook(self._before_step),
            hooks.register_optimizer_step_post_hook(self._after_step),
        ):
            patches.undo_by(handle.remove)

    def replayed(self, captured: Captured, launch: Callable[[], Any]) -> Any:
        """Replay a graph by ``launch``, and mark what it holds of a step."""
        result = self._backward(launch)() if captured.backwards else launch()
        for reference in captured.optimizers:
            if (optimizer := reference()) is not None:
                self._before_step(optimizer, (optimizer,), {})
                self._after_step(optimizer, (optimizer,), {})
        return result

    def _backward(self, original: Function) -> Function:
        recorder = self._recorder

        def backward(*args: Any, **kwargs: Any) -> Any:
            if self.capture is not None and recorder.on_training_thread():
                self.capture.backwards += 1
                return original(*args, **kwargs)
            if recorder.bursts.paused and not self._steps_inside:
                return original(*args, **kwargs)
            if not recorder.active or self._around_steps is Activity.BACKWARD:
                return original(*args, **kwargs)
            if recorder.bursts.paused and recorder.on_training_thread():
                self._around_steps = Activity.BACKWARD
                try:
                    return original(*args, **kwargs)
                finally:
                    self._around_steps = Activity.USER
                    if not self._recorder.bursts.paused:  # a step inside has ended it
                        recorder.switch(Activity.USER)
            if not recorder.on_training_thread():
                if recorder.state.steps:
                    return original(*args, **kwargs)
                recorder.use_this_thread()
            recorder.ensure_started()
            self._calls_backward = True
            self._trains()
            before = recorder.switch(Activity.BACKWARD, BackwardBegan(), Point.BACKWARD)
            recorder.calibrate_if_asked(Point.BACKWARD)
            self._around_steps = Activity.BACKWARD
            self._mark_exchange(args)
            try:
                return original(*args, **kwargs)
            finally:
                self._around_steps = Activity.USER
                if not recorder.bursts.paused:  # it may have begun with a step inside
                    recorder.switch(before, BackwardEnded())

        return backward

    def _mark_exchange(self, args: tuple[Any, ...]) -> None:
        """Mark where autograd's own work ends: then DDP and FSDP wait for the exchange of gradients.

        They queue callbacks for the end of backward, as we do, and callbacks run in the order queued. On a GPU the host
        does not wait there.
        """
        recorder, state = self._recorder, self._state
        if state.world_size < 2 or recorder.clock is not None:
            return
        root = next((root for root in self._roots(args) if getattr(root, "grad_fn", None) is not None), None)
        if root is None:
            return

        def computed() -> None:
            if recorder.on_training_thread() and recorder.activity is Activity.BACKWARD:
                state.measures_exchange = True
                recorder.switch(Activity.COMMUNICATION)

        def began(_gradient: Any) -> None:
            handle.remove()
            self._torch.autograd.Variable._execution_engine.queue_callback(computed)

        handle = root.register_hook(began)

    def _roots(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The tensors that backward() was called for."""
        return () if not args else (args[0],) if isinstance(args[0], self._torch.Tensor) else tuple(args[0])

    def _grad(self, original: Function) -> Function:
        recorder = self._recorder
        timed_grad = timed(recorder, original, Activity.BACKWARD)

        def grad(*args: Any, **kwargs: Any) -> Any:
            slopes = timed_grad(*args, **kwargs)
            if not self._calls_backward and not self._state.optimizers and recorder.on_training_thread():
                self._update_by_hand()
            return slopes

        return grad

    def _update_by_hand(self) -> None:
        """torch.autograd.grad ran, and there has been no backward() and no optimizer: once a batch, that is a step.

        Without a loader, the first line that calls it does so once a step.
        """
        if drawn := sum(stats.batches for stats in self._loaders.all):
            is_next, self._drawn_before = drawn > self._drawn_before, drawn
        else:
            line = users_line()
            self._gradients_at = self._gradients_at or line
            is_next = line == self._gradients_at
        if is_next:
            self._alone += 1
            if self._alone == GRADIENTS_ALONE:
                for _ in range(GRADIENTS_ALONE - 1):  # the steps before, which were not counted
                    self._stand_in_for_backward()
            if self._alone >= GRADIENTS_ALONE:
                self._stand_in_for_backward()

    def _trains_here(self) -> bool:
        """Whether this thread trains: the one that calls backward, or one of autograd's own that runs it and its hooks.

        Python does not know autograd's threads, and the training thread waits for them.
        """
        recorder = self._recorder
        if recorder.on_training_thread():
            return True
        if not recorder.active or self._around_steps is not Activity.BACKWARD:
            return False
        return threading.get_ident() not in {thread.ident for thread in threading.enumerate()}

    def _trains(self) -> None:
        self._recorder.training = True
        self._recorder.gradients_off.trains()
        self._recorder.eval_mode = self._loaders.was_evaluating = False
        self._recorder.evaluation.forget()
        self._loaders.trained()

    def _stand_in_for_backward(self) -> None:
        """Count a backward for gradients made otherwise (torch.autograd.grad, torch.func, by hand)."""
        self._recorder.ensure_started()
        self._trains()
        self._recorder.switch(self._recorder.activity, BackwardBegan())
        self._recorder.switch(self._recorder.activity, BackwardEnded())

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder = self._recorder
        if self.capture is not None and recorder.on_training_thread():
            self.capture.optimizers.append(weakref.ref(optimizer))
            return
        if not recorder.active or recorder.bursts.paused or self._torch.compiler.is_compiling():
            return
        if not self._trains_here():
            if recorder.state.steps:
                return
            recorder.use_this_thread()
        key = id(optimizer)
        if key not in self._state.optimizers:
            self._add_optimizer(optimizer)
        if key in self._stepping:
            self._stepping.clear()  # the last step of this optimizer ended in an exception
        self._stepping.append(key)
        # A closure holds the whole step (LBFGS, Lightning): its code is the user's, which only samples can split.
        if len(self._stepping) == 1 and not any(callable(given) for given in (*args[1:], *kwargs.values())):
            recorder.switch(Activity.OPTIMIZER)

    def _after_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        recorder = self._recorder
        if self.capture is not None or self._torch.compiler.is_compiling():
            return
        if recorder.bursts.paused:
            if id(optimizer) in self._counting_optimizers and (recorder.on_training_thread() or self._trains_here()):
                recorder.counted_step()
            return
        if not self._trains_here() or id(optimizer) not in self._stepping:
            return
        while self._stepping and self._stepping.pop() != id(optimizer):
            pass
        if self._stepping:
            return  # an optimizer inside another one: the outer one's step is the step
        if not self._calls_backward:
            if not _has_gradients(optimizer):
                recorder.switch(Activity.USER)  # it changes nothing: some scripts do that for a scheduler's check
                return
            self._stand_in_for_backward()
        self._stepped(id(optimizer), skipped=False)

    def _stepped(self, key: int, skipped: bool) -> None:
        recorder = self._recorder
        self._state.optimizer_calls += 1
        self._counting_optimizers.add(key)
        recorder.gradients_off.stepped(key)
        self._steps_inside = self._steps_inside or self._around_steps is Activity.BACKWARD
        recorder.calibration.under_way = False
        if recorder.activity is Activity.USER:
            recorder.switch(Activity.OPTIMIZER)  # after a closure, too, what follows comes after a step
        recorder.switch(self._around_steps, OptimizerStepped(key, skipped), Point.STEP)
        if not self._loaders.all:
            recorder.calibrate_if_asked(Point.BATCH)
        calls = self._state.optimizer_calls
        if self._state.replicas and (calls % ASK_REPLICAS_EVERY == 0 or calls in ASK_REPLICAS_EARLY):
            self._state.read_communication()
        if self._state.memory is None and calls >= ASK_MEMORY_AT:
            self._measure_memory()
        recorder.stepped()

    def _measure_memory(self) -> None:
        """Measure the memory by part at the end of a step, while the gradients are there."""
        known = [optimizer for reference in self._known if (optimizer := reference()) is not None]
        try:
            gpu = None if self._recorder.clock is None else self._state.gpu
            self._state.memory = memory_parts(self._torch, known, gpu)
        except Exception as error:  # an unusual optimizer must not stop the training
            self._state.memory = MemoryRecord(0, 0, 0, 0)
            self._state.remark(f"memory by part: {type(error).__name__}: {error}")

    def _add_optimizer(self, optimizer: Any) -> None:
        """The first step of an optimizer: note what it trains and on which device."""
        self._recorder.ensure_started()
        self._state.learn_rank()
        self._state.learn_group()
        self._state.optimizers[id(optimizer)] = type(optimizer).__name__
        self._known.append(weakref.ref(optimizer))
        groups = optimizer.param_groups
        if self._state.learning_rate is None and groups:  # as the optimizer was made: a schedule may begin below that
            self._state.learning_rate = _number(groups[0].get("initial_lr", groups[0].get("lr")))
        self._state.fused_optimizer = bool(groups[0]["fused"]) if groups and "fused" in groups[0] else None
        parameters = [parameter for group in groups for parameter in group["params"]]
        self._trained.update(id(parameter) for parameter in parameters)
        if parameters:
            self._state.parameter_dtype = str(parameters[0].dtype).removeprefix("torch.")
            self._state.sharded |= any(_is_sharded(parameter) for parameter in parameters)
            if parameters[0].is_cuda:
                self._recorder.trains_on_gpu(self._torch, parameters[0].device.index or 0)
                self._trains_on_gpu()

    def _scaler_step(self, original: Function) -> Function:
        recorder, state = self._recorder, self._state

        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not recorder.on_training_thread() or not scaler.is_enabled():
                return original(scaler, optimizer, *args, **kwargs)
            recorder.resume()
            state.scaler = True
            calls = state.optimizer_calls
            before = recorder.switch(Activity.OPTIMIZER)
            try:
                return original(scaler, optimizer, *args, **kwargs)
            finally:
                if state.optimizer_calls == calls and recorder.on_training_thread():
                    inner = getattr(optimizer, "optimizer", optimizer)
                    self._stepped(id(inner), skipped=True)
                else:
                    recorder.switch(before)

        return step

    def _autocast(self, original: Function) -> Function:
        state = self._state

        def __enter__(context: Any) -> Any:  # noqa: N807
            if state.autocast is None and getattr(context, "_enabled", False):
                state.autocast = str(getattr(context, "fast_dtype", "")).removeprefix("torch.") or None
            return original(context)

        return __enter__

    def _gradients_off(self, original: Function) -> Function:
        recorder, are_on = self._recorder, self._torch.is_grad_enabled
        of_decorators = self._torch.utils._contextlib.__file__

        def __enter__(context: Any) -> Any:  # noqa: N807
            if not recorder.training or recorder.eval_mode or not are_on():
                return original(context)
            entered = original(context)
            frame = sys._getframe(1)
            while frame.f_code.co_filename == of_decorators and frame.f_back is not None:
                frame = frame.f_back
            recorder.gradients_off.began(context, frame)
            return entered

        return __enter__

    def _gradients_on(self, original: Function) -> Function:
        gradients_off = self._recorder.gradients_off

        def __exit__(context: Any, *error: Any) -> Any:  # noqa: N807
            original(context, *error)
            gradients_off.ended(context)

        return __exit__

    def _train(self, original: Function) -> Function:
        recorder, is_compiling = self._recorder, self._torch.compiler.is_compiling

        def train(module: Any, mode: bool = True) -> Any:
            if is_compiling() or self._depth_of_train or not recorder.on_training_thread():
                return original(module, mode)
            self._depth_of_train += 1
            try:
                return original(module, mode)
            finally:
                self._depth_of_train -= 1
                frame = sys._getframe(1)
                if self._is_trained(module):
                    recorder.gradients_off.is_seen_otherwise()
                changes = recorder.eval_mode == bool(mode) or recorder.evaluation.in_sight
                concerns = changes and self._is_trained(module)
                if concerns and (mode or not self._generation.is_rollout(self._loaders, module, frame)):
                    recorder.resume()
                    if mode:
                        self._generation.ended(self._loaders)
                        recorder.evaluation.forget()
                    else:
                        self._generation.began(self._loaders, frame)
                        recorder.evaluation.switched(module, frame, recorder.loop_frames.loop)
                    recorder.eval_mode = not mode
                    self._loaders.was_evaluating = recorder.eval_mode
                    recorder.switch(recorder.activity, EvalMode(not mode), Point.EVAL)

        return train

    def _is_trained(self, module: Any) -> bool:
        parameter = trainable(module)
        if parameter is None:
            return False
        # A library may have an optimizer of its own, as Keras has.
        return id(parameter) in self._trained if self._state.optimizers else parameter.grad is not None


def trainable(module: Any) -> Any:
    """The first parameter of a model that is to be trained, or None. Its own ``parameters()`` may be the user's."""
    own = (each for each in vars(module)["_parameters"].values() if each is not None and each.requires_grad)
    inner = (trainable(each) for each in vars(module)["_modules"].values() if each is not None)
    return next(chain(own, (each for each in inner if each is not None)), None)


def _is_sharded(parameter: Any) -> bool:
    """Whether this rank holds a part of it: a DTensor (fully_shard, tensor parallel) or FSDP's flat parameter."""
    return hasattr(parameter, "_local_tensor") or type(parameter).__name__ == "FlatParameter"


def _has_gradients(optimizer: Any) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
