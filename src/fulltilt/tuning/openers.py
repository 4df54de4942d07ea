"""Inside a trial: libraries that open a file to read and change it, past Python's own calls.

| entry point                                          | in a trial                                                 |
|------------------------------------------------------|------------------------------------------------------------|
| sqlite3, h5py, torch.from_file of what was there     | opens a copy in the scratch folder, the file stays         |
| the same where a copy would take too long            | opens it for reading; from_file maps it for itself alone   |
| sqlite3, h5py of a new file, training                | made in the scratch folder                                 |
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote

from fulltilt.tuning.guarded_types import StandsIn
from fulltilt.tuning.users_files import Guard, UsersFiles

# Where they are.
OPENERS = ("sqlite3", "sqlite3.dbapi2", "h5py._hl.files", "torch")


class Openers:
    """The guards of one trial's files."""

    def __init__(self, files: UsersFiles) -> None:
        self._files = files

    def guards(self, module: str) -> tuple[tuple[str, Guard], ...]:
        """Where to stand in a module: the path to the name, and what to make of it."""
        if module in ("sqlite3", "sqlite3.dbapi2"):
            return (("connect", self._connecting), ("Connection", self._connection))
        if module == "h5py._hl.files":
            return (("File.__init__", self._hdf5),)
        if module == "torch":
            return (("from_file", self._mapping), ("UntypedStorage.from_file", self._mapping))
        return ()

    # ------------------------------------------------------------------ sqlite3

    def _connecting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def connect(database: Any, *args: Any, **kwargs: Any) -> Any:
            return self._database(original, database, args, kwargs)

        return connect

    def _connection(self, original: Any) -> Any:
        open_database = self._database

        class Connection(original, metaclass=StandsIn):  # type: ignore[misc]
            def __init__(self, database: Any, *args: Any, **kwargs: Any) -> None:
                open_database(super().__init__, database, args, kwargs)

        return Connection

    def _database(self, original: Callable[..., Any], database: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        is_uri = kwargs.get("uri", args[6] if len(args) > 6 else False)
        given, query = _of_uri(database) if is_uri else (database, "")
        if not self._files.is_path(given) or str(given) in ("", ":memory:"):
            return original(database, *args, **kwargs)
        asked = parse_qs(query)
        if asked.get("mode") == ["memory"]:
            return original(database, *args, **kwargs)
        reads = asked.get("mode") == ["ro"] or asked.get("immutable") == ["1"]
        if not reads and self._files.is_read_only(given):
            reads, query = True, "mode=ro"
        path = self._to_read(given) if reads else self._to_write(given)
        if is_uri or reads:
            path = f"file:{quote(str(path))}" + (f"?{query}" if query else "")
            args, kwargs = args[:6], {**kwargs, "uri": True}
        return original(path, *args, **kwargs)

    # ------------------------------------------------------------------ h5py, torch

    def _hdf5(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, name: Any, mode: str | None = "r", *args: Any, **kwargs: Any) -> Any:
            if self._files.is_path(name):
                reads = mode in (None, "r")
                if not reads and self._files.is_read_only(name, starts_empty=mode == "w"):
                    reads, mode = True, "r"
                name = self._to_read(name) if reads else self._to_write(name, starts_empty=mode == "w")
            return original(file, name, mode, *args, **kwargs)

        return opened

    def _mapping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def from_file(filename: Any, shared: bool | None = None, *args: Any, **kwargs: Any) -> Any:
            if self._files.is_path(filename):
                if shared and self._files.is_read_only(filename):
                    shared = False
                filename = str(self._to_write(filename) if shared else self._to_read(filename))
            return original(filename, shared, *args, **kwargs)

        return from_file

    # ------------------------------------------------------------------ where it lies

    def _to_read(self, path: Any) -> Any:
        return self._files.aside(path) if self._files.aside(path).is_file() else path

    def _to_write(self, given: Any, starts_empty: bool = False) -> Any:
        path = self._files.copy_to_write(given, starts_empty)
        if path is given and self._files.would_be_taken_away(given):
            # sqlite makes its file later, with others beside it: what is made aside goes with all of them.
            path = self._files.aside(given)
            path.parent.mkdir(parents=True, exist_ok=True)
        return path


def _of_uri(database: Any) -> tuple[Any, str]:
    """Path and query of ``file:data.db?mode=ro``; anything else is a path already."""
    if not isinstance(database, str) or not database.startswith("file:"):
        return database, ""
    rest, _, query = database.removeprefix("file:").partition("#")[0].partition("?")
    if rest.startswith("//"):
        rest = rest[2:][rest[2:].find("/") :]  # without the machine's name, which may be empty or localhost
    return Path(unquote(rest)) if rest else "", query
