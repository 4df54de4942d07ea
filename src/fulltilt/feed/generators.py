"""Every random generator in reach of a data set: the global ones of random, numpy and torch, and its own instances."""

from __future__ import annotations

import ctypes
import functools
import pickle
import random
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

# Bounds of the search for generators: data sets hold lists of a million paths, and models, and modules.
_DEPTH = 8
_OBJECTS = 20_000
_LONG_LIST = 256

# Not searched: their insides are theirs, and their generators are the global ones.
_CLOSED = (str, bytes, bytearray, int, float, complex, bool, type(None), torch.Tensor, types.ModuleType)


class Generators:
    """The generators in reach of ``root``, whose states can be read, set from a seed, and put back."""

    def __init__(self, *roots: Any) -> None:
        self.instances = list(find_generators(roots))

    def mark(self) -> tuple[Any, ...]:
        """Something that changes whenever one of them is drawn from; cheap enough for every sample."""
        numpy = sys.modules.get("numpy")
        return (
            random.getstate(),
            _tensor_bytes(torch.default_generator.get_state()),
            _numpy_bytes(numpy) if numpy is not None else None,
            *(_mark(instance) for instance in self.instances),
        )

    def state(self) -> list[Any]:
        """The state of each, for ``restore``."""
        numpy = sys.modules.get("numpy")
        return [
            random.getstate(),
            torch.default_generator.get_state(),
            numpy.random.get_state() if numpy is not None else None,
            *(_get(instance) for instance in self.instances),
        ]

    def restore(self, state: Sequence[Any]) -> None:
        """Put every generator back to ``state``."""
        numpy = sys.modules.get("numpy")
        random.setstate(state[0])
        torch.default_generator.set_state(state[1])
        if numpy is not None and state[2] is not None:
            numpy.random.set_state(state[2])
        for instance, value in zip(self.instances, state[3:], strict=True):
            _set(instance, value)

    def seed(self, seed: int) -> None:
        """Start every generator from the 32-bit ``seed``, the data set's own instances included.

        Forked workers would otherwise all repeat the same numbers from an instance.
        """
        numpy = sys.modules.get("numpy")
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        if numpy is not None:
            numpy.random.seed(seed)
        _seed_worker_info(seed)
        for position, instance in enumerate(self.instances):
            _seed(instance, (seed + 0x9E3779B9 * (position + 1)) & 0xFFFFFFFF)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Leave every generator as it was found."""
        before = self.state()
        try:
            yield
        finally:
            self.restore(before)


def find_generators(roots: Sequence[Any]) -> Iterator[Any]:
    """Generator instances in the attributes, classes, containers, closures and used globals of ``roots``."""
    return (item for item in reached(roots) if is_generator(item))


def reached(roots: Sequence[Any]) -> Iterator[Any]:
    """Every object in the attributes, classes, containers, closures and used globals of ``roots``, within bounds."""
    seen: dict[int, Any] = {}  # held, so that no other object takes an id
    level: list[Any] = list(roots)
    for _ in range(_DEPTH):
        following: list[Any] = []
        for item in level:
            if id(item) in seen or len(seen) > _OBJECTS:
                continue
            seen[id(item)] = item
            yield item
            if not isinstance(item, _CLOSED) and not is_generator(item):
                following += _insides(item)
        level = following


def is_generator(item: Any) -> bool:
    """Whether ``item`` is a generator of random numbers other than the global ones."""
    numpy = sys.modules.get("numpy")
    if isinstance(item, random.Random) and not isinstance(item, random.SystemRandom):
        return getattr(random.random, "__self__", None) is not item  # the global one is always watched
    if isinstance(item, torch.Generator):
        return item is not torch.default_generator and item.device.type == "cpu"
    if numpy is None:
        return False
    if isinstance(item, numpy.random.RandomState):
        return item is not numpy.random.mtrand._rand
    return isinstance(item, numpy.random.Generator)


def _insides(item: Any) -> list[Any]:
    if isinstance(item, dict):
        return [value for value in list(item.values())[:_LONG_LIST] if not isinstance(value, _CLOSED)]
    if isinstance(item, list | tuple | set | frozenset):
        return [value for value in list(item)[:_LONG_LIST] if not isinstance(value, _CLOSED)]
    if isinstance(item, types.MethodType):
        return [item.__self__, item.__func__]
    if isinstance(item, types.BuiltinMethodType | types.MethodWrapperType):
        return [item.__self__]
    if isinstance(item, functools._lru_cache_wrapper):
        return [item.__wrapped__]
    if isinstance(item, functools.partial):
        return [item.func, item.args, item.keywords]
    if isinstance(item, types.GeneratorType):
        return list(item.gi_frame.f_locals.values()) if item.gi_frame is not None else []
    if isinstance(item, types.FunctionType):
        cells = [cell.cell_contents for cell in item.__closure__ or () if _filled(cell)]
        return [*_used_by(item), *cells, *(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values()]
    if isinstance(item, type):
        return _members(item) if own_module(item.__module__) else []
    own = list(getattr(item, "__dict__", {}).values())
    slots = [getattr(item, name, None) for cls in type(item).__mro__ for name in _slots(cls)]
    return own + slots + _members(type(item))


def _members(cls: type) -> list[Any]:
    """Attributes of a class, and its methods: what they use of their module is often a generator of the user's file."""
    members = [member for base in cls.__mro__ if _users_own(base) for member in vars(base).values()]
    return [_function(member) for member in members if not isinstance(member, _CLOSED)]


def _function(member: Any) -> Any:
    """The function within a static or class method or a property; anything else as it is."""
    if isinstance(member, property):
        return member.fget
    return member.func if isinstance(member, functools.cached_property) else getattr(member, "__func__", member)


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - an empty cell raises
    except ValueError:
        return False
    return True


def _users_own(cls: type) -> bool:
    return cls is not object and cls.__module__.split(".")[0] not in ("torch", "builtins", "typing", "abc")


def _mark(instance: Any) -> Any:
    state = _get(instance)
    return _tensor_bytes(state) if isinstance(state, torch.Tensor) else pickle.dumps(state)


def _tensor_bytes(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())


def _numpy_bytes(numpy: Any) -> Any:
    """The Mersenne twister behind ``numpy.random``: 624 words and a position, read where they lie."""
    generator = numpy.random.mtrand._rand._bit_generator
    if type(generator).__name__ != "MT19937":  # exchanged with numpy.random.set_bit_generator
        return pickle.dumps(generator.state)
    return ctypes.string_at(generator.ctypes.state_address, 625 * 4)


def _get(instance: Any) -> Any:
    if isinstance(instance, random.Random):
        return instance.getstate()
    if isinstance(instance, torch.Generator):
        return instance.get_state()
    return instance.bit_generator.state if hasattr(instance, "bit_generator") else instance.get_state()


def _set(instance: Any, state: Any) -> None:
    if isinstance(instance, random.Random):
        instance.setstate(state)
    elif isinstance(instance, torch.Generator):
        instance.set_state(state)
    elif hasattr(instance, "bit_generator"):
        instance.bit_generator.state = state
    else:
        instance.set_state(state)


def _seed(instance: Any, seed: int) -> None:
    if isinstance(instance, random.Random):
        instance.seed(seed)
    elif isinstance(instance, torch.Generator):
        instance.manual_seed(seed)
    elif hasattr(instance, "bit_generator"):
        instance.bit_generator.state = type(instance.bit_generator)(seed).state
    else:
        instance.seed(seed)


def _seed_worker_info(seed: int) -> None:
    """Let ``get_worker_info().seed`` be this one: a DataLoader's differs from pass to pass too."""
    info: Any = torch.utils.data.get_worker_info()
    if info is not None and hasattr(info, "seed_of_sample"):
        info.seed_of_sample = seed


# --------------------------------------------------------------------------- the user's own code


def own_module(name: str | None) -> bool:
    """Whether a module belongs to the user, and not to Python or an installed library."""
    if name is None or name == "__main__":  # also under a launcher, whose own file __main__ then is
        return True
    if name.split(".")[0] in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is None or ("site-packages" not in file and "dist-packages" not in file)


def names_in(code: types.CodeType) -> list[str]:
    """The names that ``code`` and the functions within it look up, sorted."""
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return sorted(set(code.co_names).union(*inner))


def _used_by(function: types.FunctionType) -> Iterator[Any]:
    """The globals that ``function`` uses; of the user's own modules, those of their names that it uses."""
    names = names_in(function.__code__)
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, types.ModuleType) and own_module(value.__name__):
            yield from (vars(value)[inner] for inner in names if inner in vars(value))
        elif value is not None:
            yield value
