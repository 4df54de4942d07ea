"""Inside a trial: types that open or map a file by themselves ask first (`users_files.py`).

| type                                | in a trial                                                                |
|-------------------------------------|---------------------------------------------------------------------------|
| io.FileIO                           | opens what open() would                                                   |
| mmap.mmap of what is read only here | maps it for this process alone: what is written there reaches no file     |
"""

from __future__ import annotations

import io
import mmap
from abc import ABCMeta
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fulltilt.tuning.users_files import Guard, UsersFiles


class StandsIn(ABCMeta):
    """Of a type in place of its first base: what is one of those is one of these, whoever has made it.

    An ABCMeta, because a class of the user's may have both as its bases, io.FileIO and io.RawIOBase.
    """

    def __instancecheck__(cls, instance: Any) -> bool:
        original = _replaced_by(cls)
        return super().__instancecheck__(instance) if original is None else isinstance(instance, original)

    def __subclasscheck__(cls, subclass: type) -> bool:
        original = _replaced_by(cls)
        return super().__subclasscheck__(subclass) if original is None else issubclass(subclass, original)


def _replaced_by(cls: type) -> type | None:
    """The type that this one stands in for; None for a class that the user has made of it."""
    return None if isinstance(cls.__base__, StandsIn) else cls.__base__


class GuardedTypes:
    """The guards of one trial's files."""

    def __init__(self, files: UsersFiles) -> None:
        self._files = files

    def guards(self) -> Iterator[tuple[Any, str, Guard]]:
        """Where to stand: the module, the name of the type, and what to make of it."""
        yield io, "FileIO", self._file
        yield mmap, "mmap", self._map

    def _file(self, original: Any) -> Any:
        files = self._files

        class FileIO(original, metaclass=StandsIn):  # type: ignore[misc]
            def __init__(self, file: Any, mode: str = "r", closefd: bool = True, opener: Any = None) -> None:
                open_it = super().__init__
                files.opened(file, mode, lambda file, mode: open_it(file, mode.replace("b", ""), closefd, opener))

        return FileIO

    def _map(self, original: Any) -> Any:
        files = self._files

        class Map(original, metaclass=StandsIn):  # type: ignore[misc]
            def __new__(cls, fileno: int, length: int, *args: Any, **kwargs: Any) -> Any:
                if not files.is_opened_read_only(fileno):
                    return super().__new__(cls, fileno, length, *args, **kwargs)
                offset = args[3] if len(args) > 3 else kwargs.get("offset", 0)
                return super().__new__(cls, fileno, length, access=mmap.ACCESS_COPY, offset=offset)

        Map.__name__ = Map.__qualname__ = "mmap"
        return Map
