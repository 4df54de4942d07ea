"""Calls of DataLoader in unusual forms: a partial, a data set made in the same line, settings decided by an ``if``."""

from __future__ import annotations

import pytest

from fulltilt.tuning.source_call import Refused, Rewritten, rewrite_call

WANTED = {"num_workers": 8, "persistent_workers": True}
BEFORE = {"num_workers": 0, "persistent_workers": False}

PARTIAL = """class Data(Dataset):
    pass
make = functools.partial(DataLoader, batch_size=8, num_workers=0)
train(make(Data(), shuffle=True))
val = make(other)
"""


def test_a_partial_is_changed_where_it_is_made() -> None:
    result = rewrite_call(PARTIAL, 4, WANTED, BEFORE, ("dataset", "shuffle", "batch_size", "num_workers"))
    assert isinstance(result, Rewritten), result
    assert "partial(DataLoader, batch_size=8, num_workers=8)" in result.source
    assert "train(make(Data(), shuffle=True, persistent_workers=True))" in result.source
    assert "val = make(other)\n" in result.source
    assert result.remarks == ("the change also reaches the loader made in line 5",)


@pytest.mark.parametrize("second", ["make = None", "make = functools.partial(DataLoader, num_workers=2)"])
def test_a_name_with_two_meanings_is_left_alone(second: str) -> None:
    assert isinstance(rewrite_call(f"{PARTIAL}{second}\n", 4, WANTED, BEFORE, ("num_workers",)), Refused)


OWN_LOADER = """class Data(Dataset):
    pass
class Base(DataLoader):
    pass
class Batches(Base):
    def __init__(self, data, **kw):
        kw.setdefault("num_workers", 0)
        super().__init__(data, **kw)
train(Batches(Data(), shuffle=True))
"""


def test_a_data_set_made_in_the_same_line_is_no_loader() -> None:
    result = rewrite_call(OWN_LOADER, 9, WANTED, BEFORE, ("dataset", "shuffle", "num_workers"))
    assert result == Refused("Batches(...) does not take num_workers: its constructor sets it")


@pytest.mark.parametrize("line", ["train(make_loader(Data()))", "loader = build(config())"])
def test_of_several_calls_in_a_line_none_is_accused(line: str) -> None:
    result = rewrite_call(f"class Data(Dataset):\n    pass\n{line}\n", 3, WANTED, BEFORE)
    assert result == Refused("no DataLoader(...) call stands at line 3")


BY_CONDITION = """kw = dict(batch_size=8)
if torch.cuda.is_available():
    kw.update(num_workers=4, pin_memory=True)
else:
    kw["num_workers"] = 0
loader = DataLoader(ds, **kw)
"""
OVER_A_DEFAULT = """kw = {"batch_size": 8, "num_workers": 0}
if torch.cuda.is_available():
    kw.update(num_workers=4)
loader = DataLoader(ds, **kw)
"""


def test_what_needs_workers_is_not_written_into_another_branch() -> None:
    """It was: on a machine without a GPU the diff changed what only one with a GPU would see."""
    assert rewrite_call(BY_CONDITION, 6, WANTED, BEFORE) == Refused("num_workers stands in several places of **kw")
    only_workers = rewrite_call(BY_CONDITION, 6, {"num_workers": 8}, BEFORE)
    assert isinstance(only_workers, Rewritten)
    assert 'kw["num_workers"] = 8' in only_workers.source


@pytest.mark.parametrize(
    ("in_force", "changed"),
    [
        (0, '{"batch_size": 8, "num_workers": 8, "persistent_workers": True}'),
        (4, "kw.update(num_workers=8, persistent_workers=True)"),
    ],
)
def test_of_several_places_it_goes_beside_the_workers_that_were_in_force(in_force: int, changed: str) -> None:
    result = rewrite_call(OVER_A_DEFAULT, 4, WANTED, {**BEFORE, "num_workers": in_force})
    assert isinstance(result, Rewritten), result
    assert changed in result.source
    assert result.source.count("persistent_workers") == 1


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = DataLoader(ds, 8,  # fits\n)\n", "x = DataLoader(ds, 8,  # fits\n    {},\n)\n"),
        ("x = DataLoader(ds, 8  # fits\n)\n", "x = DataLoader(ds, 8,  # fits\n    {}\n)\n"),
        ("x = DataLoader(ds, 8,\n# workers?\n)\n", "x = DataLoader(ds, 8,\n# workers?\n    {},\n)\n"),
    ],
)
def test_a_comment_behind_arguments_on_one_line_stays(source: str, expected: str) -> None:
    result = rewrite_call(source, 1, WANTED, BEFORE)
    assert isinstance(result, Rewritten)
    assert result.source == expected.format("num_workers=8, persistent_workers=True")


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("def f():\n    make = partial(DataLoader, num_workers=0)\ndef g(make):\n    return make(ds)\n", 4),
        ("def f():\n    make = partial(DataLoader, num_workers=0)\nx = make(ds)\n", 3),
        ("make = partial(DataLoader, num_workers=0)\ndef g(make):\n    return make(ds)\n", 3),
    ],
)
def test_a_partial_of_another_scope_is_another(source: str, line: int) -> None:
    assert isinstance(rewrite_call(source, line, WANTED, BEFORE), Refused)
