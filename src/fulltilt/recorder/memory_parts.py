"""What of the GPU's memory stays from step to step: weights, gradients, optimizer states, and everything else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from fulltilt.records import MemoryRecord


def memory_parts(torch: Any, optimizers: Iterable[Any], on_gpu: bool) -> MemoryRecord:
    """The parts as they are now. Call it when an optimizer has just stepped: gradients and states are there then."""
    parameters: dict[int, Any] = {}
    states = 0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            parameters.update((id(parameter), parameter) for parameter in group["params"])
        states += sum(_bytes(tensor) for tensor in _tensors(torch, list(optimizer.state.values())))
    weights = sum(_bytes(parameter) for parameter in parameters.values())
    gradients = sum(_bytes(parameter.grad) for parameter in parameters.values() if parameter.grad is not None)
    other = None
    if on_gpu:
        other = max(0, int(torch.cuda.memory_allocated()) - weights - gradients - states)
    count = sum(int(parameter.numel()) for parameter in parameters.values())
    return MemoryRecord(count, weights, gradients, states, other)


def _tensors(torch: Any, node: Any) -> Iterator[Any]:
    if isinstance(node, torch.Tensor):
        yield node
    elif isinstance(node, dict | list | tuple):
        for child in node.values() if isinstance(node, dict) else node:
            yield from _tensors(torch, child)


def _bytes(tensor: Any) -> int:
    local = getattr(tensor, "_local_tensor", tensor)  # a sharded tensor: only its own part lies on this GPU
    return int(local.numel() * local.element_size())
