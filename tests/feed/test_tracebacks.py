"""An error of the data set's own code shows the way through that code, and nothing of ours."""

from __future__ import annotations

import traceback

import pytest
import torch

from fulltilt import feed
from fulltilt.errors import DataError

BAD = 12  # of 20: none of those that are looked at before the first epoch


class Breaks:
    def __init__(self, *, from_the_first: bool = False) -> None:
        self.from_the_first = from_the_first

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> object:
        if index == BAD or self.from_the_first:
            self.read(index)
        return torch.zeros(2)

    def read(self, index: int) -> object:
        return {}[f"no sample {index}"]


def lines_shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize("workers", [0, 2])
def test_in_mid_epoch(workers):
    told = pytest.raises(DataError, match=f"sample {BAD} cannot be read: KeyError")
    with feed.loader(Breaks(), 5, num_workers=workers) as loader, told as caught:
        list(loader)
    _is_the_users(lines_shown(caught.value))


@pytest.mark.parametrize("workers", [0, 2])
def test_in_the_first_look(workers):
    with pytest.raises(DataError, match="sample 0 cannot be read: KeyError") as caught:
        feed.loader(Breaks(from_the_first=True), 5, num_workers=workers)
    _is_the_users(lines_shown(caught.value))


def _is_the_users(shown: str) -> None:
    assert "in __getitem__" in shown
    assert "self.read(index)" in shown
    assert 'return {}[f"no sample {index}"]' in shown
    ours = [line for line in shown.splitlines() if "fulltilt/feed/" in line and "tests" not in line]
    assert len(ours) <= 3, ours  # the call that the user made, and the one of the data set
