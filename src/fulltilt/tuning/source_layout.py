"""New arguments and entries in the layout of those that are there. Needs libcst; imported late."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import libcst as cst


class Replacing(cst.CSTTransformer):
    """Exchanges nodes, known by their identity in the tree that is visited."""

    def __init__(self, replacements: Mapping[cst.CSTNode, cst.CSTNode]) -> None:
        super().__init__()
        self._replacements = replacements

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        """What stands in a node's place."""
        return self._replacements.get(original_node, updated_node)


def with_arguments(call: cst.Call, added: Mapping[str, str]) -> cst.Call:
    """The call with more keyword arguments, each given as code."""
    return call.with_changes(args=appended(call.args, [_keyword(name, code) for name, code in added.items()]))


def appended(items: Sequence[Any], new: list[Any]) -> list[Any]:
    """More arguments or entries behind the others, in the same layout: on one line, or each on a line of its own."""
    if not items:
        return new
    *others, last = items
    between = _without_comment(others[-1].comma) if others and isinstance(others[-1].comma, cst.Comma) else _SAME_LINE
    ending = last.comma
    if isinstance(ending, cst.Comma):  # a trailing comma: what follows it closes the call
        first = last.with_changes(comma=_before_another(ending.whitespace_after, between))
        end = new[-1].with_changes(comma=_without_comment(ending))
    else:
        after = getattr(last, "whitespace_after_arg", cst.SimpleWhitespace(""))
        first = last.with_changes(comma=_before_another(after, between))
        end = new[-1]
        if hasattr(last, "whitespace_after_arg"):
            first = first.with_changes(whitespace_after_arg=cst.SimpleWhitespace(""))
            end = end.with_changes(
                whitespace_after_arg=_without_comment(cst.Comma(whitespace_after=after)).whitespace_after
            )
    return [*others, first, *(item.with_changes(comma=between) for item in new[:-1]), end]


_SAME_LINE = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))


def _without_comment(comma: cst.Comma) -> cst.Comma:
    """A comma with the line break behind it, without the comment that belongs to the argument before it."""
    space = comma.whitespace_after
    if not isinstance(space, cst.ParenthesizedWhitespace):
        return comma
    bare = cst.TrailingWhitespace(whitespace=cst.SimpleWhitespace(""))
    return comma.with_changes(whitespace_after=space.with_changes(first_line=bare, empty_lines=[]))


def _before_another(space: cst.BaseParenthesizableWhitespace, between: cst.Comma) -> cst.Comma:
    """The comma behind what was the last argument: its comment stays, and the next one is indented as the others."""
    usual = between.whitespace_after
    if isinstance(space, cst.ParenthesizedWhitespace) and isinstance(usual, cst.ParenthesizedWhitespace):
        return between.with_changes(whitespace_after=space.with_changes(indent=usual.indent, last_line=usual.last_line))
    if isinstance(space, cst.ParenthesizedWhitespace) and _has_comment(space):  # on one line so far: nothing follows it
        deeper = cst.SimpleWhitespace(f"{space.last_line.value}    ")
        return between.with_changes(whitespace_after=space.with_changes(last_line=deeper))
    return between


def _has_comment(space: cst.ParenthesizedWhitespace) -> bool:
    return space.first_line.comment is not None or any(line.comment is not None for line in space.empty_lines)


def _keyword(name: str, code: str) -> cst.Arg:
    return cst.Arg(
        keyword=cst.Name(name),
        value=cst.parse_expression(code),
        equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
    )
