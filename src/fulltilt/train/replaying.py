"""A model's forward and backward as CUDA graphs: recorded once for each shape, then replayed with one launch each.

Where kernels are short, the GPU waits for the host to launch them one by one. A graph is launched as a whole. What is
recorded is what the GPU did, though, not what Python decided: a forward that draws Python's random numbers, or changes
with the step, would be frozen. So a job has to ask for it (``cuda_graphs``); the recipes do, since they know their
models. Whatever cannot be recorded runs as it did before.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fulltilt.train.cuda_graphs import Call, Pending, Recorded, Replay, has_room, record
from fulltilt.train.settings import TrainSettings

# Shapes are recorded when they come so often: the first times libraries and compilers prepare themselves.
EAGER_FIRST = 3
# Each holds gradients of its own.
MOST_SHAPES = 16

Say = Callable[[str], None]


def wanted(settings: TrainSettings, device: torch.device, *, alone: bool) -> bool:
    """Whether a run replays its model: one GPU, and activations that are not computed again."""
    return settings.cuda_graphs and device.type == "cuda" and alone and not settings.gradient_checkpointing


class Replaying:
    """Stands in for the ``forward`` of ``called``, a model or what torch.compile made of it, until ``undo``."""

    def __init__(self, model: torch.nn.Module, called: Any, say: Say) -> None:
        self._model, self._called, self._say = model, called, say
        self._eager = called.forward
        self._recorded: dict[Any, Recorded | None] = {}  # None: it cannot be recorded
        self._seen: dict[Any, int] = {}
        self._parts: _Parts | None = None
        # A replay overwrites the activations of the one before, and recording beside another forward would fail.
        self._pending: weakref.WeakSet[Pending] = weakref.WeakSet()
        self._pool: Any = None
        self._over = False
        self._own = vars(called).get("forward")
        called.forward = _StandIn(self._forward, called)

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
        self._parts = self._pool = None
        return any_there

    def give_up(self) -> bool:
        """Record nothing any more, because memory ran out. Tells whether that gives memory back."""
        self._over = True
        return self.forget()

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        pending = Pending()
        recorded = self._recording_of(args, kwargs) if self._replays((*args, *kwargs.values())) else None
        if recorded is None:
            result = self._as_it_is(*args, **kwargs)
            pending.notice_backward(result)
        else:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            leaves = Replay.apply(recorded, pending, *tensors, *recorded.parameters)
            result = pytree.tree_unflatten(leaves, recorded.structure)
        self._pending.add(pending)
        return result

    def _as_it_is(self, *args: Any, **kwargs: Any) -> Any:
        """The call itself; where memory runs out that graphs hold, once more without them."""
        try:
            return self._eager(*args, **kwargs)
        except torch.OutOfMemoryError:
            if not self.forget():  # they are recorded anew where has_room finds that they fit
                raise
        self._say("memory ran out; the CUDA graphs gave theirs back")
        return self._eager(*args, **kwargs)

    def _replays(self, values: tuple[Any, ...]) -> bool:
        """Whether this call may be a replay: one forward of a training step, its backward next."""
        if self._over or not self._model.training or not torch.is_grad_enabled():
            return False
        if any(not pending.done for pending in self._pending):
            return False
        # Whoever wants the activations elsewhere, or computed again (torch.utils.checkpoint), would find none.
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            return False
        if self._parts is not None and self._parts.changed():
            self.forget()
        self._parts = self._parts or _Parts(self._model)
        # A replay writes the gradients anew: what another backward has left there would be lost.
        if any(parameter.grad is not None for parameter in self._parts.trained):
            return False
        return all(_fits(value) for value in values) and any(isinstance(value, torch.Tensor) for value in values)

    def _recording_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recorded | None:
        """The graphs for such a call; None where there are none yet, or never will be."""
        values = (*args, *kwargs.values())
        key = _key(values, len(args), tuple(kwargs))
        if key not in self._recorded:
            self._seen[key] = self._seen.get(key, 0) + 1
            if self._seen[key] <= EAGER_FIRST or len(self._recorded) >= MOST_SHAPES:
                return None
            tensors = [value for value in values if isinstance(value, torch.Tensor)]
            self._recorded[key] = self._record(tensors, functools.partial(_called, self._eager, args, kwargs))
        return self._recorded[key]

    def _record(self, tensors: list[torch.Tensor], call: Call) -> Recorded | None:
        assert self._parts is not None
        if not has_room(tensors[0].device, self._parts.trained):
            return None
        try:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            compiled = self._called is not self._model
            return record(call, tensors, self._parts.trained, self._model, self._pool, compiled=compiled)
        except Exception as error:  # whatever a model does that a graph cannot hold
            self._say(f"the step cannot be recorded as a CUDA graph and runs as it is: {_reason(error)}")
            self.give_up()
            return None


class _Parts:
    """The modules and parameters of a model, and how they stood when it was recorded."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules, self._parameters = list(model.modules()), list(model.parameters())
        # Other kinds of parameters lie nowhere themselves.
        self._plain = [parameter for parameter in self._parameters if type(parameter) is torch.nn.Parameter]
        self.trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        self._stood = self._stand()

    def changed(self) -> bool:
        """Whether a module is in another mode now, or a parameter trained or frozen or elsewhere."""
        return self._stand() != self._stood

    def _stand(self) -> tuple[list[bool], list[bool], list[int]]:
        return (
            [module.training for module in self._modules],
            [parameter.requires_grad for parameter in self._parameters],
            [parameter.data_ptr() for parameter in self._plain],
        )


class _StandIn:
    """What is called instead of a module's ``forward``. A copy of the module has the forward of its class again."""

    def __init__(self, forward: Callable[..., Any], module: Any) -> None:
        functools.update_wrapper(self, module.forward)
        self._forward, self._module = forward, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, "forward")


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
        (value.shape, value.dtype, value.device, value.stride())
        if isinstance(value, torch.Tensor)
        else (type(value), value)
        for value in values
    )
    arithmetic = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    return described, positional, names, arithmetic


def _reason(error: BaseException) -> str:
    """What went wrong first: leaving a recording that failed fails too."""
    while "previous error during capture" in str(error) and error.__context__ is not None:
        error = error.__context__
    said = str(error).strip()
    return said.splitlines()[0][:200] if said else type(error).__name__
