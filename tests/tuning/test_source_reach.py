"""What else a change of the source reaches, beside the loader that was studied."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from fulltilt.records import Settings
from fulltilt.tuning.source_call import Refused, Rewritten, rewrite_call
from fulltilt.tuning.source_patch import OTHER_SHUFFLES, SourceChange, propose
from tests.diagnosis import examples

BEFORE = {"num_workers": 0, "prefetch_factor": None, "pin_memory": False, "persistent_workers": False}
WANTED = {"num_workers": 4, "persistent_workers": True}


def remarks(source: str, line: int) -> tuple[str, ...]:
    result = rewrite_call(source, line, WANTED, BEFORE)
    assert isinstance(result, Rewritten), result
    return result.remarks


CONSTANT = "N = 0\ntrain = DataLoader(a, num_workers=N)\nval = DataLoader(b, num_workers=N)\n"
OVER_ANOTHER = "N = 0\nM = N\ntrain = DataLoader(a, num_workers=N)\nval = DataLoader(b, num_workers=M)\n"
ATTRIBUTE = """class Module:
    n = 0
    def train(self):
        return DataLoader(a, num_workers=self.n)
    def val(self):
        return DataLoader(b, num_workers=self.n)
"""
DICT_OF_A_CLASS = ATTRIBUTE.replace("n = 0", "kw = dict(num_workers=0)").replace("num_workers=self.n", "**self.kw")
FLAG = (
    "p.add_argument('--n', default=0)\nargs = p.parse_args()\n"
    "train = DataLoader(a, num_workers=args.n)\nval = DataLoader(b, num_workers=args.n)\n"
)


@pytest.mark.parametrize(
    ("source", "line", "other"),
    [
        (CONSTANT, 2, 3),
        (OVER_ANOTHER, 3, 4),
        (ATTRIBUTE, 4, 6),
        (DICT_OF_A_CLASS, 4, 6),
        (FLAG, 3, 4),
        ("B = {'num_workers': 0}\nt = DataLoader(a, **{**A, **B})\nv = DataLoader(b, **{**A, **B})\nA = {}\n", 2, 3),
    ],
    ids=["constant", "over another name", "attribute", "dict of a class", "flag", "merged dicts"],
)
def test_a_constant_that_also_feeds_the_validation_is_told(source: str, line: int, other: int) -> None:
    assert remarks(source, line)[-1] == f"the change also reaches the loader made in line {other}"


def test_other_loaders_with_values_of_their_own_are_not_named() -> None:
    assert remarks("N = 0\nM = 0\ntrain = DataLoader(a, num_workers=N)\nval = DataLoader(b, num_workers=M)\n", 3) == ()


def test_a_function_that_makes_several_loaders_is_told() -> None:
    twice = "def make(ds):\n    return DataLoader(ds, num_workers=0)\ntrain = make(a)\nval = make(b)\n"
    assert remarks(twice, 2) == ("make(...) makes a loader in lines 3 and 4; the change may reach all of them",)
    assert remarks(twice.replace("val = make(b)\n", ""), 2) == ()
    assert "makes several loaders" in remarks("ls = [DataLoader(d, num_workers=0) for d in (a, b)]\n", 1)[0]


def test_a_constant_that_several_callers_give_is_one_literal() -> None:
    source = "N = 0\ndef make(ds, n):\n    return DataLoader(ds, num_workers=n)\ntrain = make(a, N)\nval = make(b, N)\n"
    result = rewrite_call(source, 3, WANTED, BEFORE)
    assert isinstance(result, Rewritten), result
    assert result.source.startswith("N = 4\n")
    assert "lines 4 and 5" in result.remarks[-1]


@pytest.mark.parametrize("use", ["for e in range(N): pass", "x = layers[N]", "x = rows[:N]"])
def test_a_constant_that_counts_or_picks_something_else_is_left_alone(use: str) -> None:
    result = rewrite_call(f"N = 0\ntrain = DataLoader(a, num_workers=N)\n{use}\n", 2, WANTED, BEFORE)
    assert isinstance(result, Refused)
    assert "line 3 computes something else" in result.why


def test_persistent_workers_are_told_to_change_later_shuffles(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("loader = DataLoader(ds, shuffle=True)\n")
    in_force = Settings(num_workers=4, persistent_workers=True)
    for shuffle, told in ((True, (OTHER_SHUFFLES,)), (False, ())):
        change = propose(examples.loader(where="train.py:1", shuffle=shuffle), in_force, tmp_path)
        assert isinstance(change, SourceChange)
        assert change.remarks == told


def test_persistent_workers_do_change_later_shuffles() -> None:
    """As torch has it today; if it ever seeds them anew, the remark is to go."""

    def orders(**more: bool) -> list[list[int]]:
        torch.manual_seed(0)
        loader = DataLoader(range(50), shuffle=True, batch_size=None, num_workers=1, **more)  # type: ignore[arg-type, call-overload, var-annotated]
        return [list(loader) for _ in range(2)]

    plain, persistent = orders(), orders(persistent_workers=True)
    assert plain[0] == persistent[0]
    assert plain[1] != persistent[1]
