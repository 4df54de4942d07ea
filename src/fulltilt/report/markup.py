"""HTML and SVG built from elements, so that no text of the user can become markup.

A plain string is always text and is escaped; only ``element`` makes ``Markup``.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import TypeAlias

from fulltilt.figures import clean


class Markup(str):
    """A string that is markup already."""

    __slots__ = ()


Child: TypeAlias = "Markup | str | Iterable[Child] | None"
Attribute: TypeAlias = str | float | bool | None

_WITHOUT_CHILDREN = frozenset({"meta", "rect", "path", "line"})


def element(tag: str, *children: Child, **attributes: Attribute) -> Markup:
    """``<tag attributes>children</tag>``. Text is escaped, None is left out.

    In attribute names ``_`` stands for ``-`` (``aria_label``), and a trailing one is dropped (``class_``).
    """
    opening = f"<{tag}" + "".join(_attribute(name, value) for name, value in attributes.items())
    if tag in _WITHOUT_CHILDREN:
        return Markup(opening + "/>")
    return Markup(f"{opening}>{join(children)}</{tag}>")


def join(children: Iterable[Child]) -> Markup:
    """The children in order, text escaped."""
    return Markup("".join(map(_render, children)))


def _render(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, str):
        return html.escape(clean(child))
    return join(child)


def _attribute(name: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return f' {name}="{html.escape(clean(text))}"'
