"""Whose code a source file is, how its path is shown to the user, and tracebacks without Fulltilt's frames."""

from __future__ import annotations

import os
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import TracebackType

_HOME = Path(__file__).parents[1].as_posix() + "/"


@cache
def _stdlib() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({os.path.realpath(paths[k]) + os.sep for k in ("stdlib", "platstdlib")})


@cache
def _commands() -> str:
    """The folder of installed packages' commands, such as torchtune's ``tune``: nobody edits them."""
    return os.path.realpath(sysconfig.get_path("scripts")) + os.sep


@cache
def owner(filename: str) -> str:
    """Who a source file belongs to: user, torch (or a part of it with a meaning of its own), fulltilt, stdlib, site."""
    if "/torch/" in filename and ("site-packages" in filename or "dist-packages" in filename or _is_torch(filename)):
        return _part_of_torch(filename.rsplit("/torch/", 1)[1])
    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or "torchinductor_"
    if compiled in filename or filename.startswith("<eval_with_key>"):
        return "torch"
    if filename.startswith(_HOME):
        return "fulltilt"
    if filename.startswith("<") and not filename.startswith(("<ipython", "<stdin")):
        return "stdlib"
    if "site-packages/" in filename or "dist-packages/" in filename:
        return "site"
    real = os.path.realpath(filename)
    if real.startswith(_commands()):
        return "site"
    return "stdlib" if real.startswith(_stdlib()) else "user"


@cache
def own_package(filename: str) -> str | None:
    """The part of Fulltilt (``feed``, ``train``) that a source file belongs to; None for everybody else's files."""
    return filename[len(_HOME) :].partition("/")[0] if filename.startswith(_HOME) else None


def _is_torch(filename: str) -> bool:
    home = getattr(sys.modules.get("torch"), "__file__", None)
    return bool(home) and filename.startswith(str(Path(str(home)).parent))


def _part_of_torch(inside: str) -> str:
    if inside.startswith(("_dynamo/convert_frame", "_inductor/compile_fx", "_inductor/async_compile")):
        return "torch_compile"
    if inside.startswith(("serialization.py", "distributed/checkpoint")):
        return "torch_save"
    if inside.startswith("distributed/") and "fsdp" not in inside:
        return "torch_distributed"
    if inside.startswith("utils/data/"):
        return "torch_data"
    if inside.startswith("utils/") and not inside.startswith(
        ("utils/checkpoint", "utils/_device", "utils/_contextlib")
    ):
        return "torch_tools"
    if inside == "nn/modules/module.py":
        return "torch_module"
    return "torch"


@cache
def began_in() -> Path | None:
    """The working folder at the first call, from which the user names files; None when it is gone."""
    try:
        return Path.cwd()
    except OSError:
        return None


@cache
def shown_path(filename: str) -> str:
    """A path as the user would write it: relative to the working folder, the script or the installed packages."""
    path = Path(filename)
    if (cell := _cell_of(filename)) is not None:
        return cell
    for packages in ("site-packages/", "dist-packages/"):
        if packages in filename:
            return filename.rpartition(packages)[2]
    here = began_in()
    for base in (here, (here / (sys.argv[0] or ".")).resolve().parent) if here else ():
        try:
            return str(path.resolve().relative_to(base))
        except (ValueError, OSError):
            continue
    return filename


def _cell_of(filename: str) -> str | None:
    """``In[3]`` for the code of a notebook's cell, whose file the user does not know."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    try:
        label = shell.compile.format_code_name(filename) if shell is not None else None
    except AttributeError:
        return None
    return label[1] if label else None


# Only the parts between the script and torch. A script may well call the rest of Fulltilt itself.
BETWEEN = (f"{_HOME}recorder/", f"{_HOME}tuning/live/")


def leave_out_ours(error: BaseException | None) -> None:
    """Take Fulltilt's frames out of the traceback of an error and of its causes."""
    seen: set[int] = set()
    errors = [error]
    while errors:
        error = errors.pop()
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        error.__traceback__ = _without_ours(error.__traceback__)
        errors += [error.__cause__, error.__context__, *getattr(error, "exceptions", ())]


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    steps: list[TracebackType] = []
    while trace is not None:
        steps.append(trace)
        trace = trace.tb_next
    if not steps or _is_ours(steps[-1].tb_frame.f_code.co_filename):
        return steps[0] if steps else None
    for step in reversed(steps):
        if not _is_ours(step.tb_frame.f_code.co_filename):
            step.tb_next = trace
            trace = step
    return trace


@cache
def _is_ours(filename: str) -> bool:
    return filename.startswith(BETWEEN)
