"""The contract itself: every row of faults.md has a test here that says how it was seen to fail."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROWS = range(1, 26)


def proofs() -> dict[int, list[str]]:
    """By row, the tests that are named after it and say how they fail without its handler."""
    found: dict[int, list[str]] = {row: [] for row in ROWS}
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef) or "Seen to fail" not in (ast.get_docstring(node) or ""):
                continue
            if match := re.match(r"test_rows?_((?:\d+_(?:and_|to_)?)+)", node.name):
                for row in map(int, re.findall(r"\d+", match[1])):
                    found[row].append(f"{path.name}::{node.name}")
    return found


@pytest.mark.parametrize("row", ROWS)
def test_every_row_has_a_test_that_was_seen_to_fail(row: int) -> None:
    assert proofs()[row]
