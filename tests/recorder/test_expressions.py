"""The source text that stands for a position in bytecode."""

from __future__ import annotations

import linecache

import pytest

from fulltilt.recorder.stacks.expressions import expression_at, shown_at

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
