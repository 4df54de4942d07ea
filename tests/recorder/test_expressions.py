"""The source text at a position in bytecode, and whose C code is called there."""

from __future__ import annotations

import dis
import linecache
import math
import textwrap
from types import CodeType, ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from fulltilt.recorder.stacks.expressions import expression_at, line_at, shown_at, work_at

GLOBALS: dict[str, Any] = {
    "torch": torch,
    "np": np,
    "math": math,
    "F": torch.nn.functional,
    "table": np.ones(3),
    "weights": torch.ones(3),
}


def work_in(function: str, operation: str, names: dict[str, Any] | None = None) -> str | None:
    """What is said of the last instruction of a kind in a function given by its source."""
    source = textwrap.dedent(function).lstrip()
    filename = f"<test {hash(source)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    module = compile(source, filename, "exec")
    code = next(constant for constant in module.co_consts if isinstance(constant, CodeType))
    at = [i.offset for i in dis.get_instructions(code) if i.opname.startswith(operation)]
    return work_at(code, at[-1], names if names is not None else GLOBALS)


CALLS = [
    ("torch.mm(a, b)", "torch"),
    ("F.relu(a)", "torch"),
    ("np.exp(a)", "host"),
    ("np.linalg.svd(a)", "host"),
    ("math.exp(a)", "host"),
    ("print(a)", "host"),
    ("a.tolist()", "host"),
    ("weights.sum()", "torch"),
    ("weights.tolist()", "host"),
    ("table.sum()", "host"),
    ("torch.tensor(a)", "host"),
    ("torch.tensor(a).sum()", "torch"),
    ("weights.new_tensor(a)", "host"),
    ("self.tensor(a)", None),
    ("a.detach()", "torch"),
    ("a.detach().cpu()", "torch"),
    ("a.softmax(1)", "torch"),
    ("a.detach().numpy().mean()", "host"),
    ("self.losses.append(a)", None),
    ("self.pattern.sub(a, b)", None),
    ("unknown(a)", None),
]


@pytest.mark.parametrize(("call", "work"), CALLS, ids=[call for call, _ in CALLS])
def test_a_call_is_judged_by_what_is_called(call: str, work: str | None) -> None:
    assert work_in(f"def f(self, a, b, unknown):\n    return {call}\n", "CALL") == work


def test_an_unknown_operand_is_judged_by_the_company_it_keeps() -> None:
    assert work_in("def f(a, b):\n    return a @ b\n", "BINARY_OP") == "torch"
    assert work_in("def f(a, b):\n    np.clip\n    return a @ b\n", "BINARY_OP") == "host"
    assert work_in("def f(a, b):\n    c = a.detach().numpy()\n    return c - b\n", "BINARY_OP") == "host"
    assert work_in("def f(a, b):\n    np.clip, torch.relu\n    return a @ b\n", "BINARY_OP") == "torch"
    assert work_in("def f(a, b):\n    return a.mean()\n", "CALL", {"np": np}) == "host"


def count_positive(labels: list[float]) -> int:
    found = 0
    for label in labels:
        if label > 0.5:
            found += 1
    while found > 1:
        found -= 2
    return found


def test_a_turn_of_a_loop_is_told_as_the_loop() -> None:
    """Between two turns other threads get the lock, whatever of its body has taken the time."""
    code = count_positive.__code__
    jumps = [i.offset for i in dis.get_instructions(code) if "JUMP_BACKWARD" in i.opname]
    assert {line_at(code, jump) - code.co_firstlineno for jump in jumps} == {2, 5}
    assert {shown_at(code, jump) for jump in jumps} == {"for label in labels", "while found > 1"}
    assert {work_at(code, jump, {"torch": torch}) for jump in jumps} == {"host"}


def test_code_that_cannot_be_read_is_not_judged() -> None:
    code = compile("def f(a):\n    return a + a\n", "<nowhere>", "exec").co_consts[0]
    assert isinstance(code, CodeType)
    assert work_at(code, 4, {}) is None
    assert work_in("def f(a):\n    for x in a: pass\n", "FOR_ITER") is None


def test_no_code_of_the_users_is_called() -> None:
    class Touchy:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

    class Lazy(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(name)  # importlib's own imports the module here

    names = {"touchy": Touchy(), **GLOBALS, "lazy": Lazy("lazy")}
    assert work_in("def f(a):\n    return touchy.sum()\n", "CALL", names) == "host"
    assert work_in("def f(a):\n    return lazy.sum()\n", "CALL", names) == "host"
    assert work_in("def f(a):\n    return touchy + a\n", "BINARY_OP", names) == "torch"


SOURCE = """\
def environment(action):
    state = 0
    for turn in range(40): state += turn * action  # in Python
    label = "a # in a string"
    for batch in pool.imap(fetch, range(20)):  # the costly one
        train(batch)
    return state
"""


@pytest.mark.parametrize(
    ("at_least", "shown"),
    [
        ("state", "for turn in range(40): state += turn * action"),
        ("turn * action", "turn * action"),
        ('"a # in a string"', '"a # in a string"'),
        ("label", 'label = "a # in a string"'),
        ("pool.imap(fetch, range(20))", "pool.imap(fetch, range(20))"),
    ],
)
def test_what_is_shown_says_what_happens(at_least: str, shown: str) -> None:
    name = "shown_here.py"
    linecache.cache[name] = (len(SOURCE), None, SOURCE.splitlines(keepends=True), name)
    namespace: dict[str, object] = {}
    exec(compile(SOURCE, name, "exec"), namespace)
    code = namespace["environment"].__code__  # type: ignore[attr-defined]
    texts = {
        shown_at(code, position)
        for position in range(0, len(code.co_code), 2)
        if expression_at(code, position) == at_least
    }
    assert shown in texts
    assert at_least == shown or at_least not in texts
    assert not any("#" in (text or "") and "in a string" not in (text or "") for text in texts)


def test_operators_on_numbers_are_the_hosts_once_the_interpreter_has_seen_them() -> None:
    """Without types, an operator in a module that imports torch is taken for torch's."""

    def calibration(scores: list[float], low: float) -> int:
        found = 0
        for score in scores:
            if score < low:
                found += 1
        return found

    code = calibration.__code__
    compares = next(step.offset for step in dis.get_instructions(code) if step.opname.startswith("COMPARE_"))
    assert work_at(code, compares, GLOBALS) == "torch"
    for _ in range(100):
        calibration([0.1, 0.9] * 10, 0.5)
    assert work_at(code, compares, GLOBALS) == "host"
    assert work_at(code, 10**6, GLOBALS) is None
