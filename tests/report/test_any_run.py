"""Whatever a run folder holds, every surface shows it."""

import dataclasses
import io
import json
import random
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from rich.console import Console

from fulltilt.records import Diagnosis, Run
from fulltilt.report import page, terminal
from fulltilt.report.answer import to_plain

FLOATS = (0.0, 1e-9, 0.004, 0.3, 1.0, 17.5, 99.96, 3600.0, 1e7, 1e12)
INTEGERS = (0, 1, 2, 64, 10**6, 2**50)
TEXTS = ("", "x", "train.py:31", "<b>&\"'</b>", "\x1b[31m", "\udcff", "a\nb", "ש" * 40, "長い名前" * 30, "[/bold]")


def any_value(kind: Any, dice: random.Random) -> Any:
    """Some value of a record's field type. Hypothesis gives up on records of this size."""
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        own = {f.name: hints[f.name] for f in dataclasses.fields(kind) if hints[f.name] != tuple[kind, ...]}
        return kind(**{name: any_value(hint, dice) for name, hint in own.items()})
    if get_origin(kind) in (Union, types.UnionType):
        return any_value(dice.choice(get_args(kind)), dice)
    if get_origin(kind) is Literal:
        return dice.choice(get_args(kind))
    if get_origin(kind) is tuple:
        items = get_args(kind)
        items = items[:1] * dice.choice((0, 1, 2, 5)) if items[1:] == (Ellipsis,) else items
        return tuple(any_value(item, dice) for item in items)
    choices = {float: FLOATS, int: INTEGERS, str: TEXTS, bool: (True, False), types.NoneType: (None,)}
    return dice.choice(choices[kind])


@pytest.mark.parametrize("seed", range(40))
def test_every_surface_shows_any_run(seed):
    dice = random.Random(seed)
    run, diagnosis = any_value(Run, dice), any_value(Diagnosis, dice)
    json.dumps(to_plain(diagnosis, run), allow_nan=False)
    console = Console(file=io.StringIO(), width=dice.choice((40, 80, 200)))
    terminal.show(console, [(run, diagnosis)])
    terminal.show(console, [(run, diagnosis), (run, diagnosis)])
    assert terminal.verdict_lines(diagnosis, run.folder)
    for runs in ([(run, diagnosis)], [(run, diagnosis), (run, diagnosis)]):
        shown = page.render(runs)
        shown.encode()
        assert shown.rstrip().endswith("</html>")
        assert '<b>&"' not in shown  # one of the texts above: names never become markup
