"""What a cache was made from: files with their sizes and times, code, arguments and library versions.

A data set is fingerprinted by walking its attributes. What cannot be read in full (an open handle, an object of C)
makes the fingerprint unusable for another run: the cache then lives for this run only.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import os
import pickle
import re
import sys
import threading
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fulltilt.feed.folders import files_below
from fulltilt.feed.leaves import bytes_of, is_image
from fulltilt.feed.own_code import STANDARD, own_module, used_by
from fulltilt.feed.structure import Layout

# Libraries that decode or transform: another version may give other pixels.
_LIBRARIES = ("torch", "torchvision", "pillow", "numpy", "opencv-python", "albumentations", "h5py")
_FOLDER_ENTRIES = 2_000_000
_DEPTH = 40
# Attributes of a class that have no content of their own.
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType, property, functools.cached_property)
_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.local)


@dataclass(frozen=True)
class Fingerprint:
    """Digests of the parts, by name; ``reusable`` says whether another run may trust them."""

    label: str
    parts: dict[str, str]
    reusable: bool
    unreadable: tuple[str, ...] = ()

    def key(self, layout: Layout) -> str:
        """The name of the cache folder."""
        text = "\n".join([*(f"{name} {digest}" for name, digest in sorted(self.parts.items())), layout.describe()])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def fingerprint(dataset: Any, *, opened: Iterable[str] = ()) -> Fingerprint:
    """The fingerprint of ``dataset``.

    ``opened`` are files that it is known to read. If it names one of them nowhere, nobody can tell when others change.
    """
    walk = _Walk(unnamed=set(opened))
    walk.visit(dataset, 0)
    walk.values.update(f"length {len(dataset)}".encode())
    walk.unreadable += [
        f"{path}, which neither attributes nor code of the data set name," for path in sorted(walk.unnamed)
    ]
    versions = [f"python {sys.version_info.major}.{sys.version_info.minor}"]
    for library in _LIBRARIES:
        try:
            versions.append(f"{library} {importlib.metadata.version(library)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    parts = {
        "files": walk.files.hexdigest(),
        "code": walk.code.hexdigest(),
        "arguments": walk.values.hexdigest(),
        "versions": hashlib.blake2b("\n".join(versions).encode(), digest_size=16).hexdigest(),
    }
    where = walk.first_path or ""
    return Fingerprint(f"{type(dataset).__name__} {where}".strip(), parts, not walk.unreadable, tuple(walk.unreadable))


def _digest() -> Any:
    return hashlib.blake2b(digest_size=16)


@dataclass
class _Walk:
    files: Any = field(default_factory=_digest)
    code: Any = field(default_factory=_digest)
    values: Any = field(default_factory=_digest)
    unreadable: list[str] = field(default_factory=list)
    first_path: str | None = None
    unnamed: set[str] = field(default_factory=set)
    _seen: dict[int, tuple[int, Any]] = field(default_factory=dict)
    _folders: set[str] = field(default_factory=set)

    def visit(self, value: Any, depth: int) -> None:
        if depth > _DEPTH:
            self.unreadable.append(f"{type(value).__name__} nested deeper than {_DEPTH}")
        elif value is None or isinstance(value, bool | int | float | complex | bytes):
            self._value(repr(value))
        elif isinstance(value, str | os.PathLike):
            self._text(os.fspath(value))
        elif isinstance(value, torch.dtype | torch.device):
            self._value(str(value))
        elif id(value) in self._seen:
            self._value(f"seen as number {self._seen[id(value)][0]}")
        else:
            self._meet(value)
            self._compound(value, depth)

    def _meet(self, value: Any) -> None:
        self._seen[id(value)] = len(self._seen), value  # held, so that no other object takes its id

    def _compound(self, value: Any, depth: int) -> None:
        if isinstance(value, Mapping):
            self._value(f"mapping {len(value)}")
            for key, item in value.items():
                self.visit(key, depth + 1)
                self.visit(item, depth + 1)
        elif isinstance(value, list | tuple):
            self._value(f"list {len(value)}")
            for item in value:
                self.visit(item, depth + 1)
        elif isinstance(value, set | frozenset):
            for item in sorted(value, key=repr):
                self.visit(item, depth + 1)
        elif isinstance(value, torch.Tensor):
            self._tensor(value)
        elif type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
            self._array(value, depth)
        elif type(value).__module__.partition(".")[0] == "pandas" and hasattr(value, "to_numpy"):
            names = list(getattr(value, "columns", ()))  # column by column: each is an array of its own type
            self.visit(names, depth + 1)
            for column in [value[name] for name in names] or [value]:
                self._array(column.to_numpy(), depth)
        elif is_image(value):
            self._value(f"image {value.mode} {value.size}")
            self.values.update(value.tobytes())
        elif isinstance(value, types.ModuleType):
            self._value(f"module {value.__name__}")
        elif isinstance(value, type):
            self._class(value, depth)
        elif isinstance(value, functools.partial):
            self.visit([value.func, value.args, value.keywords], depth + 1)
        elif isinstance(value, types.MethodType):
            self.visit(value.__self__, depth + 1)
            self.visit(value.__func__, depth + 1)
        elif isinstance(value, types.FunctionType):
            self._function(value, depth)
        elif isinstance(value, types.BuiltinFunctionType):
            self._value(f"builtin {value.__qualname__}")
            if not isinstance(value.__self__, types.ModuleType | None):  # such as the ``get`` of a dict of labels
                self.visit(value.__self__, depth + 1)
        elif hasattr(value, "__wrapped__") and callable(value):  # functools.cache and the like
            self.visit(value.__wrapped__, depth + 1)
        else:
            self._object(value, depth)

    def _object(self, value: Any, depth: int) -> None:
        self._class(type(value), depth)
        if isinstance(value, _LOCKS):
            return
        if type(value).__module__.split(".")[0] in STANDARD:
            self._pickled(value)  # files, locks and sockets have no content that could be compared
            return
        state = dict(getattr(value, "__dict__", {}))
        for cls in type(value).__mro__:
            slots = vars(cls).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, name):
                    state[name] = getattr(value, name)
        for name in sorted(state):
            self._value(name)
            self.visit(state[name], depth + 1)
        if not state and not _users_own(type(value)):
            self._pickled(value)

    def _pickled(self, value: Any) -> None:
        try:
            self.values.update(pickle.dumps(value))
        except Exception:
            self.unreadable.append(type(value).__qualname__)

    def _class(self, cls: type, depth: int) -> None:
        self._value(f"{cls.__module__}.{cls.__qualname__}")
        for base in cls.__mro__:
            if id(base) in self._seen and base is not cls:
                continue
            self._meet(base)
            if not _users_own(base):
                continue
            for name, member in sorted(vars(base).items()):
                function = member.func if isinstance(member, functools.cached_property) else member
                function = member.fget if isinstance(member, property) else getattr(function, "__func__", function)
                if isinstance(function, types.FunctionType):
                    self._function(function, depth)
                elif not name.startswith("__") and not isinstance(member, _DESCRIPTORS):
                    self._value(name)
                    self.visit(member, depth + 1)

    def _function(self, function: types.FunctionType, depth: int) -> None:
        self._value(function.__qualname__)
        if not own_module(function.__module__):
            return
        # What a function holds counts for each one made by the same code: two closures of one factory differ in it.
        self.visit(function.__defaults__, depth + 1)
        self.visit(function.__kwdefaults__, depth + 1)
        for cell in function.__closure__ or ():
            try:
                self.visit(cell.cell_contents, depth + 1)
            except ValueError:
                continue
        if id(function.__code__) in self._seen:
            return
        self._meet(function.__code__)
        self._code(function.__code__)
        # Functions and constants of the user's own modules that it calls on.
        for value in used_by(function):
            self.visit(value, depth + 1)

    def _code(self, code: types.CodeType) -> None:
        self.code.update(code.co_code)
        self.code.update(repr(code.co_names).encode())
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant)
            else:
                self.code.update(_stable(constant).encode())
                for text in constant if isinstance(constant, tuple) else (constant,):
                    # C libraries open files that Python never hears of. Separators alone mean no folder by themselves.
                    if isinstance(text, str) and text.strip("/\\.~ "):
                        self._path(_folder_of_pattern(text) or text)

    def _array(self, array: Any, depth: int) -> None:
        self._value(f"array {array.dtype} {array.shape}")
        if array.dtype.kind in "OUST":  # objects and texts: the bytes would be addresses, and texts may be paths
            self.visit(array.tolist(), depth + 1)
        else:
            self.values.update(array.tobytes())

    def _text(self, text: str) -> None:
        self._value(text)
        path = self._path(text) or self._path(_folder_of_pattern(text))
        self.first_path = self.first_path or path

    def _path(self, text: str) -> str | None:
        """Take in the file or folder that ``text`` names, if it does; returns where it is."""
        if not 0 < len(text) <= 4096 or "\0" in text:
            return None
        try:
            found = os.stat(text)  # noqa: PTH116 - a million files: Path would cost seconds
        except (OSError, ValueError):
            return None
        path = os.path.abspath(text)  # noqa: PTH100
        if os.path.isdir(path):  # noqa: PTH112
            self._folder(path)
        else:
            self._file(path, found)
        return path

    def _folder(self, path: str) -> None:
        if path in self._folders:
            return
        if path in ("/", os.path.expanduser("~")):  # noqa: PTH111
            self.unreadable.append(f"the whole of {path}")
            return
        self._folders.add(path)
        for number, name in enumerate(files_below(path)):
            if number >= _FOLDER_ENTRIES:
                self.unreadable.append(f"{path} with more than {_FOLDER_ENTRIES} files")
                return
            try:
                found = os.stat(name)  # noqa: PTH116
            except OSError:
                continue
            self._file(name, found)

    def _file(self, path: str, found: os.stat_result) -> None:
        # The time of the last change of any kind as well: a copy with the old size and the old time is another file.
        line = f"{path} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}\n"
        self.files.update(line.encode("utf-8", "surrogateescape"))
        self.unnamed.discard(path)

    def _tensor(self, tensor: torch.Tensor) -> None:
        self._value(f"tensor {tensor.dtype} {tuple(tensor.shape)}")
        if tensor.numel():
            data = bytes_of(tensor.detach().cpu())
            self.values.update((ctypes.c_ubyte * data.numel()).from_address(data.data_ptr()))

    def _value(self, text: str) -> None:
        self.values.update(text.encode("utf-8", "surrogateescape"))
        self.values.update(b"\0")


def _folder_of_pattern(text: str) -> str:
    """The folder that a pattern of names begins with: ``a`` for ``a/{:04}.png`` and ``a/*.png``; "" for other texts."""
    stem = re.split(r"[%{*]", text, maxsplit=1)[0]
    return "" if stem == text else os.path.dirname(stem)  # noqa: PTH120 - a million texts


def _stable(constant: Any) -> str:
    """A constant in words that are the same in every run: the order of a set of texts is not."""
    if isinstance(constant, frozenset):
        return f"{{{', '.join(sorted(map(_stable, constant)))}}}"
    return f"({', '.join(map(_stable, constant))})" if isinstance(constant, tuple) else repr(constant)


def _users_own(cls: type) -> bool:
    return cls.__module__ != "builtins" and own_module(cls.__module__)
