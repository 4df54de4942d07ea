"""Inside a trial: one optimizer step for every so many batches, around a loop that makes one for each.

What the script does between two batches of one step must not touch what has been gathered: its ``step``, ``zero_grad``,
and a GradScaler's ``unscale_``, ``step`` and ``update`` do nothing until the last batch. A scaler unscales gradients so
that they can be clipped; there those gathered so far, which are still scaled, are put aside until they are complete.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any


class Accumulation:
    """Puts ``parts`` batches into each optimizer step, with gradients that add up to their mean."""

    def __init__(self, torch: Any, parts: int) -> None:
        self._torch = torch
        self._parts = parts
        self._batches: dict[int, int] = {}  # that each optimizer has had, by its id
        self._aside: dict[Any, Any] = {}
        self._stepped = False

    def install(self) -> None:
        """Stand around backward, every optimizer that is made from now on, and every GradScaler."""
        torch, scaler = self._torch, self._torch.amp.grad_scaler.GradScaler
        around(torch.autograd, "backward", self._backward)
        around(torch.optim.Optimizer, "__init__", self._constructed)
        around(torch.nn.Module, "zero_grad", self._model_zeroing)
        around(scaler, "unscale_", self._unscaling)
        around(scaler, "step", self._scaler_stepping)
        around(scaler, "update", self._updating)

    def _gathered(self, optimizer: Any) -> int:
        """The batches whose gradients wait for this optimizer's next step."""
        return self._batches.get(id(optimizer), 0) % self._parts

    def _is_last(self, optimizer: Any) -> bool:
        return self._gathered(optimizer) == self._parts - 1

    def _count(self, optimizer: Any) -> None:
        self._batches[id(optimizer)] = self._batches.get(id(optimizer), 0) + 1

    # ------------------------------------------------------------------ a plain loop

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def scaled(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            one = isinstance(tensors, self._torch.Tensor)
            parts = self._parts
            return original(tensors / parts if one else [t / parts for t in tensors], *args, **kwargs)

        return scaled

    def _constructed(self, original: Callable[..., None]) -> Callable[..., None]:
        def __init__(this: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(this, *args, **kwargs)
            for name, make in (("step", self._stepping), ("zero_grad", self._zeroing)):
                wrapped = functools.wraps(getattr(this, name))(make(getattr(this, name)))
                setattr(this, name, MethodType(wrapped, this))  # schedulers ask for a method

        return __init__

    def _stepping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def every_so_often(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            last = self._is_last(optimizer)
            self._count(optimizer)
            return original(*args, **kwargs) if last else None

        return every_so_often

    def _zeroing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def with_the_step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if not self._gathered(optimizer) else None

        return with_the_step

    def _model_zeroing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def zero_grad(module: Any, *args: Any, **kwargs: Any) -> Any:
            between = any(batches % self._parts for batches in self._batches.values())
            return None if between else original(module, *args, **kwargs)

        return zero_grad

    # ------------------------------------------------------------------ a loop with a GradScaler

    def _unscaling(self, original: Callable[..., None]) -> Callable[..., None]:
        def unscale_(scaler: Any, optimizer: Any) -> None:
            if self._is_last(optimizer):
                self._take_back(optimizer)
                original(scaler, optimizer)
            else:
                self._put_aside(optimizer)

        return unscale_

    def _scaler_stepping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not scaler.is_enabled():
                return original(scaler, optimizer, *args, **kwargs)
            if not self._is_last(optimizer):
                self._count(optimizer)
                return None
            result = original(scaler, optimizer, *args, **kwargs)
            self._stepped = True
            if self._gathered(optimizer):  # an overflow, which the scaler has kept from the optimizer
                self._count(optimizer)
            return result

        return step

    def _updating(self, original: Callable[..., None]) -> Callable[..., None]:
        def update(scaler: Any, *args: Any, **kwargs: Any) -> None:
            if self._stepped or not scaler.is_enabled():
                original(scaler, *args, **kwargs)
            self._stepped = False

        return update

    def _put_aside(self, optimizer: Any) -> None:
        for parameter in _parameters(optimizer):
            if parameter.grad is not None:
                kept = self._aside.get(parameter)
                self._aside[parameter] = parameter.grad if kept is None else kept.add_(parameter.grad)
                parameter.grad = None

    def _take_back(self, optimizer: Any) -> None:
        for parameter in _parameters(optimizer):
            kept = self._aside.pop(parameter, None)
            if kept is not None:
                parameter.grad = kept if parameter.grad is None else parameter.grad.add_(kept)


def around(home: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put what ``make`` makes of an attribute in its place."""
    original = getattr(home, name)
    setattr(home, name, functools.wraps(original)(make(original)))


def _parameters(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
