"""A model's forward and backward as CUDA graphs: captured once for each shape, then replayed with one launch each.

Evaluation has graphs of its own. Where kernels are short, the GPU waits for the host to launch each of them; a graph is
launched as a whole. A graph repeats what the GPU did, not what Python decided: a forward that draws Python's random
numbers, or changes with the step, would be frozen. So a job has to ask for it (``cuda_graphs``), as the recipes do.
Whatever cannot be captured runs eagerly.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fulltilt.errors import UsageError
from fulltilt.train.random_states import restore_rng, rng_state

_HOST = torch.device("cpu")
_PLAIN = (bool, int, float, str, torch.Size)
_SOURCES = {"python": "Python's", "numpy": "NumPy's", "torch": "the host's"}


class HostState:
    """The random states of the host, and the attributes of each module of ``model``, at one moment."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._random = rng_state(_HOST)
        self._modules = [
            # Buffers, parameters and caches are in dicts and lists of the module: one level of these is copied.
            (name, module, {key: (value, _copied(value)) for key, value in vars(module).items()})
            for name, module in model.named_modules()
        ]

    def change(self) -> str | None:
        """The first thing that has changed since, in words; None when nothing has."""
        now = rng_state(_HOST)
        for source, whose in _SOURCES.items():
            before = self._random.get(source)
            if not (before.equal(now[source]) if isinstance(before, torch.Tensor) else before == now.get(source)):
                return f"draws {whose} random numbers"
        for name, module, before in self._modules:
            for key, value in vars(module).items():
                if key not in before or not _same(*before[key], value):
                    return f"changes {f'{name}.{key}' if name else key}"
        return None

    def restore(self) -> None:
        """Put everything back."""
        restore_rng(self._random, _HOST)
        for _, module, before in self._modules:
            vars(module).clear()
            for key, (value, copy) in before.items():
                vars(module)[key] = value
                if isinstance(value, dict):
                    value.clear()
                    value.update(copy)
                elif isinstance(value, list):
                    value[:] = copy


def _copied(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else list(value) if isinstance(value, list) else value


def _same(value: Any, copy: Any, now: Any) -> bool:
    """Whether ``now`` is still ``value``, and holds what ``copy`` holds."""
    if value is not now:
        return isinstance(now, _PLAIN) and type(value) is type(now) and bool(value == now)
    if isinstance(now, dict):
        return copy.keys() == now.keys() and all(copy[key] is now[key] for key in now)
    return not isinstance(now, list) or [id(one) for one in copy] == [id(one) for one in now]


# --------------------------------------------------------------------------- capture


WARM_UP = 2

Call = Callable[[Sequence[torch.Tensor]], Any]


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """The graphs of one shape, and the memory that they read and write."""

    forward: Any
    backward: Any
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    output_gradients: tuple[torch.Tensor | None, ...]
    parameters: tuple[torch.nn.Parameter, ...]
    gradients: tuple[torch.Tensor | None, ...]
    structure: Any

    def replay(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The outputs of the forward for other tensors, as copies."""
        for place, given in zip(self.inputs, tensors, strict=False):
            place.copy_(given, non_blocking=True)
        self.forward.replay()
        return tuple(out.clone() for out in self.outputs)


def has_room(device: torch.device, parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Whether a captured step fits into memory in addition to an eager one of another shape."""
    free, _ = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_allocated(device)
    free += torch.cuda.memory_reserved(device) - held
    step = torch.cuda.max_memory_allocated(device) - held
    return free > 2 * step + sum(parameter.nbytes for parameter in parameters)


def capture(
    call: Call,
    tensors: Sequence[torch.Tensor],
    parameters: Sequence[torch.nn.Parameter],
    model: torch.nn.Module,
    pool: Any,
    *,
    compiled: bool = False,
) -> CapturedCall:
    """Capture ``call`` of ``model`` on copies of ``tensors``. Random states and buffers are put back afterwards.

    Without ``parameters`` there is no backward. After a failure, earlier graphs draw wrong random numbers.
    """
    device = tensors[0].device
    generator = torch.cuda.default_generators[device.index]
    drawn, host = generator.get_state(), HostState(model)
    buffers = list(model.buffers())
    inputs = tuple(tensor.clone() for tensor in tensors)  # dense, also where ``expand`` made it
    kept = [buffer.clone() for buffer in buffers]
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    # Other threads (the feed's, the recorder's) may use the GPU meanwhile: only this one is captured.
    capturing = functools.partial(torch.cuda.graph, pool=pool, stream=stream, capture_error_mode="thread_local")
    # Constants that a model makes on the host and moves (timm's EdgeNeXt does) are made on the GPU. Not for a compiled
    # model: it has moved them already, and another default device would compile it again.
    constants = contextlib.nullcontext() if compiled else torch.device(device)
    try:
        # After a failed capture older torch stays on its stream: entering the current one here leads back to it.
        with torch.cuda.stream(torch.cuda.current_stream(device)), constants:
            _renew_gradient_nodes(parameters)
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    warm = pytree.tree_leaves(call(inputs))
                    if parameters:
                        _gradients_of(warm, [torch.zeros_like(out) for out in warm], parameters)
            del warm
            torch.cuda.synchronize(device)
            torch.clear_autocast_cache()  # or the graph would use weights cast once and never again
            with capturing(forward):
                result = call(inputs)
            leaves, structure = pytree.tree_flatten(result)
            output_gradients = tuple(torch.zeros_like(out) if out.requires_grad else None for out in leaves)
            gradients: tuple[torch.Tensor | None, ...] = ()
            if parameters:
                with capturing(backward):
                    gradients = _in_own_memory(_gradients_of(leaves, output_gradients, parameters))
        if (change := host.change()) is not None:
            raise RuntimeError(f"its forward {change}, which a replay would not")
        generator.set_state(drawn)
    except BaseException:
        # A generator stays in capture mode after a failure: replace its state.
        another = torch.Generator(device)
        another.set_state(drawn)
        generator.graphsafe_set_state(another.graphsafe_get_state())
        raise
    finally:
        torch.clear_autocast_cache()  # it holds casts that only a replay computes
        torch.cuda.synchronize(device)
        host.restore()
        with torch.no_grad():
            for buffer, before in zip(buffers, kept, strict=True):
                buffer.copy_(before)
    outputs = tuple(out.detach() for out in leaves)
    return CapturedCall(forward, backward, inputs, outputs, output_gradients, tuple(parameters), gradients, structure)


class PendingBackward:
    """A forward whose backward may still come. The autograd graph holds it and frees it."""

    def __init__(self) -> None:
        self.done = False

    def notice_backward(self, result: Any) -> None:
        """Set ``done`` when a gradient reaches one of the tensors of ``result``."""
        for out in pytree.tree_leaves(result):
            if isinstance(out, torch.Tensor) and out.grad_fn is not None:
                out.register_hook(self._mark_done)  # type: ignore[no-untyped-call, unused-ignore]

    def _mark_done(self, _gradient: torch.Tensor) -> None:
        self.done = True


class Replay(torch.autograd.Function):
    """A replayed forward, whose backward is a replay."""

    @staticmethod
    def forward(
        ctx: Any, captured: CapturedCall, pending: PendingBackward, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The outputs, as copies that the next replay does not overwrite."""
        ctx.captured, ctx.pending = captured, pending
        outputs = captured.replay(tensors)
        fixed = [out for out, grad in zip(outputs, captured.output_gradients, strict=True) if grad is None]
        ctx.mark_non_differentiable(*fixed)
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of the parameters, in memory that the next replay overwrites."""
        captured = ctx.captured
        if ctx.pending.done:  # its activations are overwritten
            what = "backward goes twice through one forward, which a replay from CUDA graphs cannot do"
            raise UsageError(what, "Set cuda_graphs: false.")
        for place, given in zip(captured.output_gradients, gradients, strict=True):
            if place is not None:
                place.copy_(given, non_blocking=True)
        captured.backward.replay()
        ctx.pending.done = True
        found = tuple(None if gradient is None else gradient.detach() for gradient in captured.gradients)
        return (None, None, *(None for _ in captured.inputs), *found)


def _gradients_of(
    outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], parameters: Sequence[torch.nn.Parameter]
) -> tuple[torch.Tensor | None, ...]:
    asked = [(out, grad) for out, grad in zip(outputs, gradients, strict=True) if out.requires_grad]
    return torch.autograd.grad(
        [out for out, _ in asked], list(parameters), [grad for _, grad in asked], allow_unused=True
    )


def _renew_gradient_nodes(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Make the next forward create new AccumulateGrad nodes.

    A parameter's node lives as long as any autograd graph that ends in it, such as that of the last loss, and keeps
    the stream of its first forward. A backward would wait for that stream, which a capture does not allow.
    """
    for parameter in parameters:
        if type(parameter) is not torch.nn.Parameter:
            continue  # other kinds have rules of their own
        data = parameter.data
        other = torch.float16 if data.dtype != torch.float16 else torch.float32
        parameter.data = data.new_empty(0, dtype=other)  # another dtype makes torch drop the node
        parameter.data = data


def _in_own_memory(gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """Gradients that share no memory: in ``a + b`` both get the same tensor, and clipping is in place."""
    places = [None if gradient is None else gradient.untyped_storage().data_ptr() for gradient in gradients]
    return tuple(
        gradient.clone() if gradient is not None and place in places[:index] else gradient
        for index, (gradient, place) in enumerate(zip(gradients, places, strict=True))
    )


# --------------------------------------------------------------------------- replay


# A shape is captured after so many eager calls, in which libraries and compilers warm up.
EAGER_FIRST = 3
# Each shape holds gradients of its own.
MOST_SHAPES = 16

Say = Callable[[str], None]


class GraphedModel:
    """Replaces the ``forward`` of ``called``, the model or its compiled version, until ``undo``."""

    def __init__(self, model: torch.nn.Module, called: Any, say: Say) -> None:
        self._model, self._called, self._say = model, called, say
        self._eager = called.forward
        self._graphs: dict[Any, CapturedCall | None] = {}  # None: it cannot be captured
        self._seen: dict[Any, int] = {}
        self._states: dict[bool, _ModelState] = {}  # for training, and for evaluation
        # A replay overwrites the activations of the one before; a capture during another forward would fail.
        self._pending: weakref.WeakSet[PendingBackward] = weakref.WeakSet()
        self._pool: Any = None
        self._given_up: set[bool] = set()  # of training (True) and evaluation (False)
        self._own = vars(called).get("forward")
        called.forward = _GraphedForward(self._forward, called)

    def undo(self) -> None:
        """Put the original ``forward`` back."""
        self.forget()
        if self._own is not None:
            self._called.forward = self._own
        elif "forward" in vars(self._called):
            del self._called.forward

    def forget(self) -> bool:
        """Free all graphs, also when the trainable parameters change. Returns whether there were any."""
        any_there = any(self._graphs.values())
        self._graphs.clear()
        self._seen.clear()
        self._states.clear()
        self._pool = None
        return any_there

    def give_up(self) -> bool:
        """Stop capturing, because memory ran out. Returns whether that freed any."""
        self._given_up = {True, False}
        return self.forget()

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        captured = self._captured_for(args, kwargs, tensors) if tensors and self._replays(values) else None
        pending = PendingBackward()
        if captured is None:
            result = self._eager(*args, **kwargs)
            pending.notice_backward(result)
        elif torch.is_grad_enabled():
            leaves = Replay.apply(captured, pending, *tensors, *captured.parameters)
            result = pytree.tree_unflatten(leaves, captured.structure)
        else:
            return pytree.tree_unflatten(captured.replay(tensors), captured.structure)
        if torch.is_grad_enabled():
            self._pending.add(pending)
        return result

    def _replays(self, values: tuple[Any, ...]) -> bool:
        """Whether this call may be a replay: the only forward before a backward, or one of an evaluation."""
        training = self._model.training
        if training in self._given_up or training != torch.is_grad_enabled():
            return False
        if any(not pending.done for pending in self._pending):
            return False
        # Hooks on saved tensors (activation checkpointing, offloading) would see none.
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            return False
        if training in self._states and self._states[training].changed():
            self.forget()
        if training not in self._states:
            self._states[training] = _ModelState(self._model)
        # A replay overwrites the gradients: those of another backward would be lost.
        if training and any(parameter.grad is not None for parameter in self._states[True].trained):
            return False
        return all(_fits(value) for value in values)

    def _captured_for(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> CapturedCall | None:
        """The graphs for this call; None where there are none yet, or the call cannot be captured."""
        training = self._model.training
        key = training, torch.is_inference_mode_enabled(), _call_key(args, kwargs)
        if key not in self._graphs:
            self._seen[key] = self._seen.get(key, 0) + 1
            if self._seen[key] <= EAGER_FIRST or sum(one[0] is training for one in self._graphs) >= MOST_SHAPES:
                return None
            self._graphs[key] = self._capture(tensors, functools.partial(_with_tensors, self._eager, args, kwargs))
        return self._graphs[key]

    def _capture(self, tensors: list[torch.Tensor], call: Call) -> CapturedCall | None:
        trained = self._states[True].trained if self._model.training else []
        if not has_room(tensors[0].device, trained):
            return None
        try:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            compiled = self._called is not self._model
            return capture(call, tensors, trained, self._model, self._pool, compiled=compiled)
        except Exception as error:  # whatever a model does that a graph cannot hold
            what = "step" if trained else "evaluation"
            self._say(f"the {what} cannot be captured as a CUDA graph and runs as it is: {_capture_error(error)}")
            if trained:
                self.give_up()
            else:
                self._given_up.add(False)
                self.forget()  # the graphs of steps draw wrong random numbers now, and are captured again
            return None


class _ModelState:
    """The modules and parameters of a model, and their modes and places when it was captured."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules, self._parameters = list(model.modules()), list(model.parameters())
        # Other kinds of parameters have no memory of their own.
        self._plain = [parameter for parameter in self._parameters if type(parameter) is torch.nn.Parameter]
        self.trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        self._captured = self._now()

    def changed(self) -> bool:
        """Whether a module's mode, or a parameter's requires_grad or address, is another one now."""
        return self._now() != self._captured

    def _now(self) -> tuple[list[bool], list[bool], list[int]]:
        return (
            [module.training for module in self._modules],
            [parameter.requires_grad for parameter in self._parameters],
            [parameter.data_ptr() for parameter in self._plain],
        )


class _GraphedForward:
    """Called instead of a module's ``forward``. A copy of the module has the original one."""

    def __init__(self, forward: Callable[..., Any], module: Any) -> None:
        functools.update_wrapper(self, module.forward)
        self._forward, self._module = forward, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, "forward")


def _with_tensors(
    eager: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Any]
) -> Any:
    """``eager`` with other tensors in the places of those that it was called with."""
    given = iter(tensors)
    swapped = [next(given) if isinstance(value, torch.Tensor) else value for value in (*args, *kwargs.values())]
    return eager(*swapped[: len(args)], **dict(zip(kwargs, swapped[len(args) :], strict=True)))


def _fits(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_cuda and not value.requires_grad
    return value is None or isinstance(value, bool | int | float | str)


def _call_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    described = tuple(
        (value.shape, value.dtype, value.device, value.stride())
        if isinstance(value, torch.Tensor)
        else (type(value), value)
        for value in (*args, *kwargs.values())
    )
    arithmetic = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    return described, tuple(kwargs), arithmetic


def _capture_error(error: BaseException) -> str:
    """The first error: leaving a failed capture raises another one."""
    while "previous error during capture" in str(error) and error.__context__ is not None:
        error = error.__context__
    said = str(error).strip()
    return said.splitlines()[0][:200] if said else type(error).__name__
