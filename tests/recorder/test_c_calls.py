"""Whose C code a line calls is told without a look at what the function holds."""

from __future__ import annotations

import dis
import linecache
import math
import textwrap
from types import CodeType
from typing import Any

import numpy as np
import pytest
import torch

from fulltilt.recorder.stacks.expressions import work_at

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


def test_a_name_is_followed_to_what_it_was_assigned() -> None:
    follows = """
        def f(logits, labels):
            scores = logits.detach().numpy()
            scores = scores - scores.max()
            return scores * labels
    """
    assert work_in(follows, "BINARY_OP") == "host"
    made_by_torch = """
        def f(a):
            h = torch.relu(a)
            low, high = h, h.max(1)
            return low * 2
    """
    assert work_in(made_by_torch, "BINARY_OP") == "torch"


def test_an_annotation_tells_what_an_argument_is() -> None:
    assert work_in("def f(image: np.ndarray, k: float):\n    return image * k\n", "BINARY_OP") == "host"
    assert work_in("def f(image: torch.Tensor, k: float):\n    return image * k\n", "BINARY_OP") == "torch"


def test_an_unknown_operand_is_judged_by_the_company_it_keeps() -> None:
    assert work_in("def f(a, b):\n    return a @ b\n", "BINARY_OP") == "torch"
    assert work_in("def f(a, b):\n    np.clip\n    return a @ b\n", "BINARY_OP") == "host"
    assert work_in("def f(a, b):\n    np.clip, torch.relu\n    return a @ b\n", "BINARY_OP") == "torch"
    assert work_in("def f(a, b):\n    return a.mean()\n", "CALL", {"np": np}) == "host"


def test_code_that_cannot_be_read_is_not_judged() -> None:
    code = compile("def f(a):\n    return a + a\n", "<nowhere>", "exec").co_consts[0]
    assert isinstance(code, CodeType)
    assert work_at(code, 4, {}) is None
    assert work_in("def f(a):\n    for x in a: pass\n", "FOR_ITER") is None


def test_no_code_of_the_users_is_called() -> None:
    class Touchy:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

    names = {"touchy": Touchy(), **GLOBALS}
    assert work_in("def f(a):\n    return touchy.sum()\n", "CALL", names) == "host"
    assert work_in("def f(a):\n    return touchy + a\n", "BINARY_OP", names) == "torch"
