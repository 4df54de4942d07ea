"""A model's forward and backward as CUDA graphs: recorded once for each shape, then replayed with one launch each.

Where kernels are short, the GPU waits for the host to launch them one by one. A graph is launched as a whole. What is
recorded is what the GPU did, though, not what Python decided: a forward that draws Python's random numbers, or changes
with the step, would be frozen. So a job has to ask for it (``cuda_graphs``); the recipes do, since they know their
models. Whatever cannot be recorded runs as it did before.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

# Shapes are recorded when they come so often: the first times libraries and compilers prepare themselves.
EAGER_FIRST = 3
# Each holds gradients of its own.
MOST_SHAPES = 16
WARM_UP = 2

Say = Callable[[str], None]
Call = Callable[[Sequence[torch.Tensor]], Any]


class Replaying:
    """Stands in for the ``forward`` of ``called``, a model or what torch.compile made of it, until ``undo``."""

    def __init__(self, model: torch.nn.Module, called: Any, say: Say) -> None:
        self._model, self._called, self._say = model, called, say
        self._eager = called.forward
        self._recorded: dict[Any, Recorded | None] = {}  # None: it cannot be recorded
        self._seen: dict[Any, int] = {}
        self._parameters: list[torch.nn.Parameter] | None = None
        # A replay overwrites the activations of the one before, whose backward must have been.
        self._pending: Callable[[], Pending | None] = lambda: None
        # Calls as they are whose backward has not come: recording beside them would fail.
        self._open = 0
        self._pool: Any = None
        self._over = False
        self._own = vars(called).get("forward")

        @functools.wraps(self._eager)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._forward(*args, **kwargs)

        called.forward = forward

    def undo(self) -> None:
        """Leave it as it was."""
        self.forget()
        if self._own is not None:
            self._called.forward = self._own
        elif "forward" in vars(self._called):
            del self._called.forward

    def forget(self) -> bool:
        """Give the memory of all graphs back; tells whether there were any. Also for other trainable parameters."""
        any_there = any(self._recorded.values())
        self._recorded.clear()
        self._seen.clear()
        self._parameters = self._pool = None
        return any_there

    def give_up(self) -> bool:
        """Record nothing any more, because memory ran out. Tells whether that gives memory back."""
        self._over = True
        return self.forget()

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        if not self._replays(values):
            return self._eager(*args, **kwargs)
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        key = _key(values, len(args), tuple(kwargs))
        if key not in self._recorded:
            self._seen[key] = self._seen.get(key, 0) + 1
            if self._seen[key] <= EAGER_FIRST or len(self._recorded) >= MOST_SHAPES or self._open:
                return self._noticed(self._eager(*args, **kwargs))
            self._recorded[key] = self._record(tensors, functools.partial(_called, self._eager, args, kwargs))
        recorded = self._recorded.get(key)
        if recorded is None:
            return self._eager(*args, **kwargs)
        pending = Pending()
        self._pending = weakref.ref(pending)
        leaves = _Replay.apply(recorded, pending, *tensors, *recorded.parameters)
        return pytree.tree_unflatten(leaves, recorded.structure)

    def _noticed(self, result: Any) -> Any:
        """The result of a call as it is; its backward will be noticed."""
        for out in pytree.tree_leaves(result):
            if isinstance(out, torch.Tensor) and out.requires_grad:
                self._open += 1
                out.register_hook(self._backward_came)  # type: ignore[no-untyped-call, unused-ignore]
                break
        return result

    def _backward_came(self, _gradient: torch.Tensor) -> None:
        self._open = max(self._open - 1, 0)

    def _replays(self, values: tuple[Any, ...]) -> bool:
        """Whether this call may be a replay: one forward of a training step, its backward next."""
        pending = self._pending()
        if self._over or (pending is not None and not pending.done):
            return False
        if not self._model.training or not torch.is_grad_enabled():
            return False
        if self._parameters is None:
            self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        # A replay writes the gradients anew: what another backward has left there would be lost.
        if any(parameter.grad is not None for parameter in self._parameters):
            return False
        return all(_fits(value) for value in values) and any(isinstance(value, torch.Tensor) for value in values)

    def _record(self, tensors: list[torch.Tensor], call: Call) -> Recorded | None:
        assert self._parameters is not None
        if not has_room(tensors[0].device, self._parameters):
            return None
        try:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            return record(call, tensors, self._parameters, list(self._model.buffers()), self._pool)
        except Exception as error:  # whatever a model does that a graph cannot hold
            reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
            self._say(f"the step cannot be recorded as a CUDA graph and runs as it is: {reason}")
            self.give_up()
            return None


class Pending:
    """A replayed forward whose backward may come. It is part of the autograd graph and goes with it."""

    def __init__(self) -> None:
        self.done = False


@dataclass(frozen=True, slots=True)
class Recorded:
    """The graphs of one shape, and the memory that they read and write."""

    forward: Any
    backward: Any
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    output_gradients: tuple[torch.Tensor | None, ...]
    parameters: tuple[torch.nn.Parameter, ...]
    gradients: tuple[torch.Tensor | None, ...]
    structure: Any


def has_room(device: torch.device, parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Whether a recorded step fits beside one that is not: other shapes, and evaluations, still come."""
    free, _ = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_allocated(device)
    free += torch.cuda.memory_reserved(device) - held
    step = torch.cuda.max_memory_allocated(device) - held
    return free > 2 * step + sum(parameter.nbytes for parameter in parameters)


def record(
    call: Call,
    tensors: Sequence[torch.Tensor],
    parameters: Sequence[torch.nn.Parameter],
    buffers: Sequence[torch.Tensor],
    pool: Any,
) -> Recorded:
    """Record ``call`` on copies of ``tensors``. Random numbers and buffers are afterwards as they were.

    When that fails, graphs recorded before no longer draw the right random numbers.
    """
    device = tensors[0].device
    generator = torch.cuda.default_generators[device.index]
    drawn, drawn_on_host = generator.get_state(), torch.get_rng_state()
    inputs = tuple(torch.empty_like(tensor, memory_format=_dense(tensor)).copy_(tensor) for tensor in tensors)
    kept = [buffer.clone() for buffer in buffers]
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    # Other threads (the feed's, an observer's) may talk to the GPU meanwhile: only this one is recorded.
    recording = functools.partial(torch.cuda.graph, pool=pool, stream=stream, capture_error_mode="thread_local")
    autocast = torch.autocast(
        "cuda",
        dtype=torch.get_autocast_dtype("cuda"),
        enabled=torch.is_autocast_enabled("cuda"),
        cache_enabled=False,  # a weight that was cast before would never be cast again
    )
    try:
        # Models that make a constant on the host and move it (timm's EdgeNeXt does) make it on the GPU at once.
        with torch.device(device), autocast:
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    warm = pytree.tree_leaves(call(inputs))
                    _gradients_of(warm, [torch.zeros_like(out) for out in warm], parameters)
            del warm
            torch.cuda.synchronize(device)
            with recording(forward):
                result = call(inputs)
            leaves, structure = pytree.tree_flatten(result)
            output_gradients = tuple(torch.zeros_like(out) if out.requires_grad else None for out in leaves)
            with recording(backward):
                gradients = _gradients_of(leaves, output_gradients, parameters)
        generator.set_state(drawn)
    except BaseException:
        # A generator that was being recorded when that failed would stay so for good: go on with a new one.
        another = torch.Generator(device)
        another.set_state(drawn)
        generator.graphsafe_set_state(another.graphsafe_get_state())
        raise
    finally:
        torch.cuda.synchronize(device)
        torch.set_rng_state(drawn_on_host)
        with torch.no_grad():
            for buffer, before in zip(buffers, kept, strict=True):
                buffer.copy_(before)
    outputs = tuple(out.detach() for out in leaves)
    return Recorded(
        forward, backward, inputs, outputs, output_gradients, tuple(parameters), tuple(gradients), structure
    )


class _Replay(torch.autograd.Function):
    """A replayed forward, whose backward is a replay."""

    @staticmethod
    def forward(ctx: Any, recorded: Recorded, pending: Pending, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.recorded, ctx.pending = recorded, pending
        for place, given in zip(recorded.inputs, tensors, strict=False):
            place.copy_(given, non_blocking=True)
        recorded.forward.replay()
        outputs = tuple(out.clone() for out in recorded.outputs)
        fixed = [out for out, grad in zip(outputs, recorded.output_gradients, strict=True) if grad is None]
        ctx.mark_non_differentiable(*fixed)
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        recorded = ctx.recorded
        for place, given in zip(recorded.output_gradients, gradients, strict=True):
            if place is not None:
                place.copy_(given, non_blocking=True)
        recorded.backward.replay()
        ctx.pending.done = True
        found = tuple(None if gradient is None else gradient.detach() for gradient in recorded.gradients)
        return (None, None, *(None for _ in recorded.inputs), *found)


def _gradients_of(
    outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], parameters: Sequence[torch.nn.Parameter]
) -> tuple[torch.Tensor | None, ...]:
    asked = [(out, grad) for out, grad in zip(outputs, gradients, strict=True) if out.requires_grad]
    return torch.autograd.grad(
        [out for out, _ in asked], list(parameters), [grad for _, grad in asked], allow_unused=True
    )


def _called(eager: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Any]) -> Any:
    """``eager`` with other tensors in the places of those that it was called with."""
    given = iter(tensors)
    swapped = [next(given) if isinstance(value, torch.Tensor) else value for value in (*args, *kwargs.values())]
    return eager(*swapped[: len(args)], **dict(zip(kwargs, swapped[len(args) :], strict=True)))


def _fits(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_cuda and not value.requires_grad
    return value is None or isinstance(value, bool | int | float | str)


def _key(values: tuple[Any, ...], positional: int, names: tuple[str, ...]) -> Any:
    described = tuple(
        (value.shape, value.dtype, value.device, value.stride()) if isinstance(value, torch.Tensor) else value
        for value in values
    )
    arithmetic = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    return described, positional, names, arithmetic


def _dense(tensor: torch.Tensor) -> torch.memory_format:
    """A tensor that repeats itself (``expand``) is copied whole; others keep their layout."""
    return torch.contiguous_format if 0 in tensor.stride() else torch.preserve_format
