"""One call of a model as two CUDA graphs: its forward and its backward, with the memory that they read and write."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fulltilt.errors import UsageError
from fulltilt.train.host_state import HostState

WARM_UP = 2

Call = Callable[[Sequence[torch.Tensor]], Any]


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
    model: torch.nn.Module,
    pool: Any,
    *,
    compiled: bool = False,
) -> Recorded:
    """Record ``call`` of ``model`` on copies of ``tensors``. Random numbers and buffers are afterwards as they were.

    When that fails, graphs recorded before no longer draw the right random numbers.
    """
    device = tensors[0].device
    generator = torch.cuda.default_generators[device.index]
    drawn, host = generator.get_state(), HostState(model)
    buffers = list(model.buffers())
    inputs = tuple(torch.empty_like(tensor, memory_format=_dense(tensor)).copy_(tensor) for tensor in tensors)
    kept = [buffer.clone() for buffer in buffers]
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    # Other threads (the feed's, an observer's) may talk to the GPU meanwhile: only this one is recorded.
    recording = functools.partial(torch.cuda.graph, pool=pool, stream=stream, capture_error_mode="thread_local")
    # Models that make a constant on the host and move it (timm's EdgeNeXt does) make it on the GPU at once. A compiled
    # one has moved it there, and would be compiled again: torch.compile looks at how it is called.
    constants = contextlib.nullcontext() if compiled else torch.device(device)
    try:
        # Older torch goes on in the stream of a recording that failed: the one of now is entered to be gone back to.
        with torch.cuda.stream(torch.cuda.current_stream(device)), constants:
            _renew_ends(parameters)
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    warm = pytree.tree_leaves(call(inputs))
                    _gradients_of(warm, [torch.zeros_like(out) for out in warm], parameters)
            del warm
            torch.cuda.synchronize(device)
            torch.clear_autocast_cache()  # a weight that was cast before would never be cast again
            with recording(forward):
                result = call(inputs)
            leaves, structure = pytree.tree_flatten(result)
            output_gradients = tuple(torch.zeros_like(out) if out.requires_grad else None for out in leaves)
            with recording(backward):
                gradients = _apart(_gradients_of(leaves, output_gradients, parameters))
        if (change := host.change()) is not None:
            raise RuntimeError(f"its forward {change}, which a replay would not")
        generator.set_state(drawn)
    except BaseException:
        # A generator that was being recorded when that failed would stay so for good: go on with a new one.
        another = torch.Generator(device)
        another.set_state(drawn)
        generator.graphsafe_set_state(another.graphsafe_get_state())
        raise
    finally:
        torch.clear_autocast_cache()  # casts that only a replay computes
        torch.cuda.synchronize(device)
        host.restore()
        with torch.no_grad():
            for buffer, before in zip(buffers, kept, strict=True):
                buffer.copy_(before)
    outputs = tuple(out.detach() for out in leaves)
    return Recorded(forward, backward, inputs, outputs, output_gradients, tuple(parameters), gradients, structure)


class Pending:
    """A forward whose backward may come. It is part of the autograd graph and goes with it."""

    def __init__(self) -> None:
        self.done = False

    def notice_backward(self, result: Any) -> None:
        """Be done as soon as a gradient comes to one of the tensors of ``result``."""
        for out in pytree.tree_leaves(result):
            if isinstance(out, torch.Tensor) and out.grad_fn is not None:
                out.register_hook(self._came)  # type: ignore[no-untyped-call, unused-ignore]

    def _came(self, _gradient: torch.Tensor) -> None:
        self.done = True


class Replay(torch.autograd.Function):
    """A replayed forward, whose backward is a replay."""

    @staticmethod
    def forward(ctx: Any, recorded: Recorded, pending: Pending, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The outputs, in memory that the next replay leaves alone."""
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
        """The gradients of the parameters, in memory that the next replay writes anew."""
        recorded = ctx.recorded
        if ctx.pending.done:  # the activations have made way for the gradients
            what = "backward goes twice through one forward, which a replay from CUDA graphs cannot do"
            raise UsageError(what, "Set cuda_graphs: false.")
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


def _renew_ends(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Let the next forward end in new nodes of the autograd graph.

    A parameter's node lives as long as any graph that ends in it, say that of the last step's loss, and remembers the
    stream of its first forward. A backward of today would wait for that stream, which no recording can hold.
    """
    for parameter in parameters:
        if type(parameter) is not torch.nn.Parameter:
            continue  # other kinds have rules of their own
        data = parameter.data
        other = torch.float16 if data.dtype != torch.float16 else torch.float32
        parameter.data = data.new_empty(0, dtype=other)  # a node for numbers of another kind is of no use any more
        parameter.data = data


def _apart(gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """Gradients with memory of their own: those of ``a`` and ``b`` in ``a + b`` are one, and are clipped in place."""
    found: list[torch.Tensor | None] = []
    known: set[int] = set()
    for gradient in gradients:
        own = gradient
        if gradient is not None:
            memory = gradient.untyped_storage().data_ptr()
            own = gradient.clone() if memory in known else gradient
            known.add(memory)
        found.append(own)
    return tuple(found)


def _dense(tensor: torch.Tensor) -> torch.memory_format:
    """A tensor that repeats itself (``expand``) is copied whole; others keep their layout."""
    return torch.contiguous_format if 0 in tensor.stride() else torch.preserve_format
