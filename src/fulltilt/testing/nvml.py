"""A fake of the pynvml module with GPUs that follow a script over time.

Every call is checked against the signature of the real function; structures, constants and errors are the real
ones; and what the fake does not know is "not supported", as with a real GPU.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pynvml

from fulltilt.testing.clock import FakeClock
from fulltilt.testing.driver import FakeDriver
from fulltilt.testing.gpus import FakeGpu


class FakeNvml:
    """Pass it as ``Gpus.open(nvml=...)``. ``calls`` counts the calls of each function."""

    def __init__(
        self,
        gpus: Sequence[FakeGpu] = (),
        clock: Callable[[], float] | None = None,
        *,
        init_error: int | None = None,
        unknown: Sequence[str] = (),
        slow: Mapping[str, float] | None = None,
    ) -> None:
        """``unknown`` names functions that this driver is too old for; ``slow`` those that take seconds."""
        self.driver = FakeDriver(tuple(gpus), clock or FakeClock(), init_error)
        self._slow = slow or {}
        self._unknown = frozenset(unknown)
        self.calls: Counter[str] = Counter()

    @property
    def gpus(self) -> tuple[FakeGpu, ...]:
        """The GPUs in the order of the PCI bus."""
        return self.driver.gpus

    def __getattr__(self, name: str) -> Any:
        """Everything that is not a function comes from the real module."""
        real = getattr(pynvml, name)
        if not inspect.isfunction(real):
            return real
        signature = inspect.signature(real)

        def call(*arguments: Any, **named: Any) -> Any:
            bound = signature.bind(*arguments, **named)
            bound.apply_defaults()
            self.calls[name] += 1
            if isinstance(self.driver.clock, FakeClock):
                self.driver.clock.advance(self._slow.get(name, 0.0))
            return self._ask(name, bound.args)

        setattr(self, name, call)
        return call

    def _ask(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if name in self._unknown:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        if name != "nvmlInit" and not self.driver.sessions:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        answer = getattr(self.driver, name, None)
        if answer is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if arguments and isinstance(arguments[0], FakeGpu):
            self.driver.raise_if_lost(arguments[0])
        return answer(*arguments)
