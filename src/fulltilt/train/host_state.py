"""What a model's forward changes on the host. A replayed one changes nothing there, so what it would is a reason not to
replay it: random numbers of Python's, a counter, a buffer that is replaced instead of written to, a cache.
"""

from __future__ import annotations

from typing import Any

import torch

from fulltilt.train import rng

_HOST = torch.device("cpu")
_PLAIN = (bool, int, float, str, torch.Size)
_SOURCES = {"python": "Python's", "numpy": "NumPy's", "torch": "the host's"}


class HostState:
    """Random states, and what each module of ``model`` remembers, as they are now."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._random = rng.capture(_HOST)
        self._modules = [
            (name, module, {key: (value, _copied(value)) for key, value in vars(module).items()})
            for name, module in model.named_modules()
        ]

    def change(self) -> str | None:
        """The first thing that has changed since, in words; None when nothing has."""
        now = rng.capture(_HOST)
        for source, whose in _SOURCES.items():
            if not _same_state(self._random.get(source), now.get(source)):
                return f"draws {whose} random numbers"
        for name, module, before in self._modules:
            for key in _changed(module, before):
                return f"changes {f'{name}.{key}' if name else key}"
        return None

    def restore(self) -> None:
        """Make everything as it was."""
        rng.restore(self._random, _HOST)
        for _, module, before in self._modules:
            for key in _changed(module, before):
                if key not in before:
                    del vars(module)[key]
                    continue
                value, copy = before[key]
                vars(module)[key] = value
                if isinstance(value, dict):
                    value.clear()
                    value.update(copy)
                elif isinstance(value, list):
                    value[:] = copy


def _copied(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else list(value) if isinstance(value, list) else value


def _changed(module: torch.nn.Module, before: dict[str, tuple[Any, Any]]) -> list[str]:
    now = vars(module)
    kept = [key for key in before if key in now and _same(*before[key], now[key])]
    return [key for key in {**before, **now} if key not in kept]


def _same(value: Any, copy: Any, now: Any) -> bool:
    """Whether ``now`` is still ``value``, and holds what ``copy`` holds: buffers and parameters are in dicts too."""
    if value is not now:
        return isinstance(now, _PLAIN) and type(value) is type(now) and bool(value == now)
    if isinstance(now, dict):
        return copy.keys() == now.keys() and all(copy[key] is now[key] for key in now)
    return not isinstance(now, list) or [id(one) for one in copy] == [id(one) for one in now]


def _same_state(before: Any, now: Any) -> bool:
    return before.equal(now) if isinstance(now, torch.Tensor) else bool(before == now)
