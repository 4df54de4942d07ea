"""What a thread is doing, read from its Python stack: whose code it is, which line, and whether torch is at work.

A sample costs about 20 µs: everything that depends only on a code position is worked out once and remembered.
"""

from __future__ import annotations

import ast
import dis
import linecache
import os
import queue
import re
import sys
import sysconfig
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

GENERATOR = 0x20  # inspect.CO_GENERATOR
DEEPEST = 100

# How libraries call their writing of checkpoints: it is more than torch.save (transformers renames all weights).
SAVING = frozenset({"save_pretrained", "save_checkpoint", "_save_checkpoint", "save_state", "save_model"})
BODY = re.compile(r"(async |for |while |with |if |try:|def |class )")
# Tensor methods whose time is the host's: they bring values over to Python.
TO_PYTHON = frozenset({"tolist", "numpy", "item", "__array__"})


Spot = tuple[CodeType, int]  # a code object and the position in its bytecode


@dataclass(frozen=True, slots=True)
class StackView:
    """One look at a thread: the kind of its work, the user's line that caused it, and the expression there."""

    kind: str
    where: str
    function: str
    call: str | None


@cache
def _stdlib() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({os.path.realpath(paths[k]) + os.sep for k in ("stdlib", "platstdlib")})


@cache
def owner(filename: str) -> str:
    """Who a source file belongs to: user, torch (or a part of it with a meaning of its own), fulltilt, stdlib, site."""
    path = filename.replace("\\", "/")
    if "/torch/" in path and ("site-packages" in path or "dist-packages" in path or _is_torch(path)):
        return _part_of_torch(path.rsplit("/torch/", 1)[1])
    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or "torchinductor_"
    if compiled in path or path.startswith("<eval_with_key>"):
        return "torch"
    if "/fulltilt/" in path and path.startswith(str(Path(__file__).parents[1]).replace("\\", "/")):
        return "fulltilt"
    if path.startswith("<") and not path.startswith(("<ipython", "<stdin")):
        return "stdlib"
    if "site-packages/" in path or "dist-packages/" in path:
        return "site"
    if os.path.realpath(filename).startswith(_stdlib()):
        return "stdlib"
    return "user"


def _is_torch(path: str) -> bool:
    torch = sys.modules.get("torch")
    home = getattr(torch, "__file__", None)
    return bool(home) and path.startswith(str(Path(str(home)).parent).replace("\\", "/"))


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
def shown_path(filename: str) -> str:
    """A path as the user would write it: relative to the working folder, the script or the installed packages."""
    path = Path(filename)
    if (cell := _cell_of(filename)) is not None:
        return cell
    for packages in ("site-packages/", "dist-packages/"):
        if packages in filename:
            return filename.rpartition(packages)[2]
    for base in (Path.cwd(), Path(sys.argv[0] or ".").resolve().parent):
        try:
            return str(path.resolve().relative_to(base))
        except (ValueError, OSError):
            continue
    return filename


def _cell_of(filename: str) -> str | None:
    """``In[3]`` for the code of a notebook's cell, which lies in no file that the user knows."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    try:
        label = shell.compile.format_code_name(filename) if shell is not None else None
    except AttributeError:
        return None
    return label[1] if label else None


def spots(frame: FrameType | None) -> frozenset[Spot]:
    """The positions of all calls on the stack whose innermost frame this is."""
    found: list[Spot] = []
    while frame is not None:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return frozenset(found)


def look(frame: FrameType, inside: CodeType | None = None, ways_in: frozenset[Spot] = frozenset()) -> StackView | None:
    """What the thread whose innermost frame this is was doing, and on which line of the user's.

    Only frames inside a call of ``inside`` count; None when the thread has left it already. A line that is one of
    ``ways_in`` is not named: it only led into the training loop (``trainer.train()``); the library's line says more.
    """
    chain = _positions_of(frame)
    top = chain[0]
    top_owner = owner(top.f_code.co_filename)
    user: Position | None = None
    outside: Position | None = None
    in_module = in_generator = in_library_module = False
    special: str | None = None
    if inside is not None and not any(current.f_code is inside for current in chain):
        return None
    for current in chain:
        if current.f_code is inside:
            break
        who = owner(current.f_code.co_filename)
        if who == "torch_module":
            in_library_module = in_library_module or (not in_module and user is None and outside is not None)
            in_module = True
        elif who == "torch_compile":
            special = special or "compile"
        elif who == "torch_save":
            special = special or "checkpoint"
        elif who == "torch_data" and current.f_code.co_name == "_shutdown_workers":
            special = "turnover"
        elif who == "torch_distributed" and top_owner == who:
            special = special or "communication"
        elif who == "site":
            if "/safetensors/" in current.f_code.co_filename or current.f_code.co_name in SAVING:
                special = special or "checkpoint"
            outside = outside or current
        elif who == "user":
            if user is None and (current.f_code, current.f_lasti) not in ways_in:
                user = current
            if current.f_code.co_flags & GENERATOR and not in_module:
                in_generator = True
    named = user or outside or next((f for f in chain if owner(f.f_code.co_filename) != "fulltilt"), top)
    # The Python inside a library's model is part of what the model costs; only a model of the user's can be changed.
    kind = special or ("torch" if in_library_module else _kind(frame, top_owner, in_module))
    if kind != "torch" and special is None and in_generator and not in_module:
        kind = "data"
    if kind == "host" and top.f_code.co_filename in _waiting_rooms():
        kind = "waiting"
    return _view(named, kind)


@cache
def _waiting_rooms() -> frozenset[str]:
    """The files in which a thread waits for another one."""
    return frozenset({threading.__file__, queue.__file__})


class Position(NamedTuple):
    """A frame as it was at one moment."""

    f_code: CodeType
    f_lasti: int


def _positions_of(frame: FrameType | None) -> list[Position]:
    """The stack from its innermost frame on, taken down at once.

    What follows may let the thread run on, and then a frame that has returned forgets its caller. Under Python 3.11 it
    is worse: a frame whose locals are just being freed (a ``__del__`` runs) may be looked at, but not kept.
    """
    found: list[Position] = []
    while frame is not None and len(found) < DEEPEST:
        found.append(Position(frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return found


def _view(frame: Position, kind: str) -> StackView:
    code, position = frame
    line = _span_at(code, position)[0] or code.co_firstlineno  # None between two lines
    return StackView(kind, f"{shown_path(code.co_filename)}:{line}", code.co_qualname, expression_at(code, position))


def _kind(frame: FrameType, top_owner: str, in_module: bool) -> str:
    if top_owner in ("torch", "torch_module"):
        return "torch"
    if top_owner in ("torch_data", "torch_tools"):
        return "host"
    if top_owner == "torch_distributed":
        return "communication"
    verdict = _work_at(frame)
    if verdict is None:
        verdict = "torch" if in_module else "host"
    return verdict


def users_line(ways_in: frozenset[Spot] = frozenset()) -> tuple[str, str]:
    """file:line and function of the innermost code that is the user's, or at least not torch's or ours.

    A line of the user's that only leads into a library's training loop is passed over.
    """
    frame: FrameType | None = sys._getframe(2)
    outside: tuple[str, str] | None = None
    while frame is not None:
        code = frame.f_code
        who = owner(code.co_filename)
        if who == "user" and (code, frame.f_lasti) not in ways_in:
            return f"{shown_path(code.co_filename)}:{frame.f_lineno}", code.co_qualname
        if who == "site" and outside is None:
            outside = f"{shown_path(code.co_filename)}:{frame.f_lineno}", code.co_qualname
        frame = frame.f_back
    return outside or ("unknown:0", "unknown")


# --------------------------------------------------------------------------- the expression being evaluated

_positions: dict[CodeType, list[tuple[int | None, int | None, int | None, int | None]]] = {}
_expressions: dict[tuple[CodeType, int], str | None] = {}
_works: dict[tuple[CodeType, int], str] = {}


def expression_at(code: CodeType, position: int) -> str | None:
    """The source text of the expression at a bytecode position, at most one line of it; None where unknown."""
    key = (code, position)
    if key not in _expressions:
        _expressions[key] = _source_segment(code, position)
    return _expressions[key]


def _span_at(code: CodeType, position: int) -> tuple[int | None, int | None, int | None, int | None]:
    """First and last line and column of the instruction at a bytecode position."""
    if code not in _positions:
        _positions[code] = list(code.co_positions())
    spots = _positions[code]
    return spots[position // 2] if 0 <= position // 2 < len(spots) else (None, None, None, None)


def _source_segment(code: CodeType, position: int) -> str | None:
    line, end_line, column, end_column = _span_at(code, position)
    if line is None or end_line is None or column is None or end_column is None:
        return None
    lines = [linecache.getline(code.co_filename, number) for number in range(line, min(end_line, line + 20) + 1)]
    if not lines or not lines[0]:
        return None
    # Columns count bytes of UTF-8.
    if end_line == line:
        text = lines[0].encode()[column:end_column].decode(errors="replace")
    else:
        lines[-1] = lines[-1].encode()[:end_column].decode(errors="replace")
        lines[0] = lines[0].encode()[column:].decode(errors="replace")
        # Of a statement with a body (the loop itself), the first line says enough.
        text = lines[0].strip().rstrip(":") if BODY.match(lines[0]) else " ".join(part.strip() for part in lines)
    text = " ".join(text.split())
    return text if len(text) <= 200 else text[:197] + "..."


def _work_at(frame: FrameType) -> str | None:
    """Whether the C code called at this very position is torch's ("torch") or not ("host"); None when unclear."""
    key = (frame.f_code, frame.f_lasti)
    if key in _works:
        return _works[key]
    text = expression_at(*key)
    verdict = None
    if text is not None:
        try:
            verdict = _judge(text, frame)
        except (SyntaxError, ValueError, RecursionError):
            verdict = None
    if verdict is not None:
        _works[key] = verdict
    return verdict


def _judge(text: str, frame: FrameType) -> str | None:
    tree = ast.parse(text)
    if not tree.body:
        return None
    statement = tree.body[0]
    node: ast.AST = statement.value if isinstance(statement, ast.Expr) else statement
    if isinstance(node, ast.Call):
        return _judge_call(node.func, frame)
    names = {leaf.id for leaf in ast.walk(node) if isinstance(leaf, ast.Name)}
    found = [value for name in names if (value := _lookup(name, frame)) is not _UNKNOWN]
    if any(_is_tensor(value) for value in found):
        return "torch"
    return "host" if found and len(found) == len(names) else None


def _judge_call(function: ast.expr, frame: FrameType) -> str | None:
    attributes: list[str] = []
    while isinstance(function, ast.Attribute):
        attributes.append(function.attr)
        function = function.value
    method = attributes[0] if attributes else None
    if isinstance(function, ast.Call):
        # A chain such as loss.detach().cpu(): what counts is the object it began with.
        return "host" if method in TO_PYTHON else _judge_call(function.func, frame)
    if not isinstance(function, ast.Name):
        return None
    root = _lookup(function.id, frame)
    if root is _UNKNOWN:
        return None
    if _is_tensor(root):
        return "host" if method in TO_PYTHON else "torch"
    if isinstance(root, ModuleType):
        return "torch" if root.__name__.partition(".")[0] == "torch" else "host"
    home = getattr(type(root), "__module__", "") or ""
    if not attributes:
        home = getattr(root, "__module__", None) or ""
        return "torch" if str(home).partition(".")[0] == "torch" else "host"
    if str(home).partition(".")[0] == "torch":
        return "torch"
    # A method of the user's own object: its attribute may well be a tensor.
    return None if len(attributes) > 1 else "host"


_UNKNOWN = object()
_RETURNS = frozenset(dis.opmap[name] for name in ("RETURN_VALUE", "RETURN_CONST") if name in dis.opmap)


def _lookup(name: str, frame: FrameType) -> Any:
    # The locals of a frame that returns are being freed: they must not be touched.
    returning = frame.f_lasti < 0 or frame.f_code.co_code[frame.f_lasti] in _RETURNS
    for scope in (() if returning else (frame.f_locals,)), (frame.f_globals, frame.f_builtins):
        for names in scope:
            if name in names:
                return names[name]
    return _UNKNOWN


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(type(value), torch.Tensor)
