"""How a job is started: the command that Python itself would run, resolved before anything is recorded."""

from __future__ import annotations

import difflib
import shutil
import subprocess
import sys
from pathlib import Path

import fulltilt
from fulltilt.errors import UsageError
from fulltilt.recorder.launchers import LAUNCHERS


def job_command(arguments: list[str]) -> list[str]:
    """The command line to run for what the user wrote after `fulltilt run`. Raises UsageError."""
    if not arguments:
        raise UsageError("nothing to run", "Give a script: fulltilt run train.py ARGS, or: fulltilt run -- torchrun …")
    python = [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
    first = arguments[0]
    if first == "-m" and len(arguments) < 2:
        raise UsageError("-m needs the name of a module", "For example: fulltilt run -m package.train ARGS")
    if first in ("-m", "-c"):
        return [*python, *arguments]
    path = Path(first)
    if path.suffix in (".py", ".pyz") or (path.is_dir() and (path / "__main__.py").exists()):
        if not path.exists():
            raise UsageError(f"{first} does not exist{_similar(path)}", f"The working folder is {Path.cwd()}.")
        _refuse_namesake(path if path.is_dir() else path.resolve().parent)
        return [*python, *arguments]
    if first in LAUNCHERS:
        beside = Path(sys.executable).parent / first
        return [*([str(beside)] if beside.exists() else [*python, *LAUNCHERS[first]]), *arguments[1:]]
    if first in ("python", "python3") and shutil.which(first) is None:
        return [*python, *arguments[1:]]
    found = shutil.which(first)
    if found is not None:
        return [found, *arguments[1:]]
    if path.is_file():
        return [*python, *arguments]
    if path.is_dir():
        raise UsageError(f"{first} is a folder without a __main__.py", "Give the script inside it.")
    raise UsageError(
        f"{first} is neither a script nor a program that can be found", f"The working folder is {Path.cwd()}."
    )


def _refuse_namesake(folder: Path) -> None:
    """Refuse a script beside a module called fulltilt: in the job its imports would find this package instead."""
    for module in (folder / "fulltilt.py", folder / "fulltilt" / "__init__.py"):
        if module.exists() and not module.samefile(fulltilt.__file__):
            raise UsageError(
                f"{module} has the name of this package: the script would import the wrong one", "Rename it."
            )


def _similar(path: Path) -> str:
    """The script that was probably meant, of those in the same folder."""
    names = [other.stem for other in path.parent.glob("*.py")]  # .py alone makes no likeness
    close = difflib.get_close_matches(path.stem, names, n=1)
    return f"; did you mean {path.with_name(f'{close[0]}.py')}?" if close else ""


def job_name(arguments: list[str]) -> str:
    """A short name for a job: its script's, also behind a launcher."""
    for index, argument in enumerate(arguments):
        if argument == "-m" and index + 1 < len(arguments) and not arguments[index + 1].startswith("torch.distributed"):
            return arguments[index + 1]
        if argument.endswith(".py"):
            return Path(argument).stem
    return Path(arguments[0]).name if arguments else "job"
