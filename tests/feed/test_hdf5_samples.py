"""Samples cut out of rows are those that one would pick by hand, however they are gathered."""

from __future__ import annotations

import pytest
import torch

from fulltilt.feed import hdf5_samples
from fulltilt.feed.hdf5_blocks import Column, Source
from fulltilt.feed.hdf5_samples import Cutter

ROWS = 40
FEATURES = torch.arange(ROWS * 6, dtype=torch.float32).view(ROWS, 2, 3)
LABELS = torch.arange(ROWS)


def cutter(window: int | None) -> Cutter:
    columns = (Column("x", (2, 3), torch.float32, 24, 8), Column("y", (), torch.int64, 8, 8))
    source = Source(("a.h5",), (ROWS,), columns, window, 1, (0,))
    return Cutter(source, ("x",) if window else (), torch.device("cpu"))


@pytest.mark.parametrize("at_once", [0, hdf5_samples.AT_ONCE_BYTES])
@pytest.mark.parametrize("window", [None, 1, 7])
def test_batches_are_what_one_would_pick_by_hand(
    window: int | None, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hdf5_samples, "AT_ONCE_BYTES", at_once)
    starts = torch.randperm(ROWS - (window or 1) + 1, generator=torch.Generator().manual_seed(3))
    found = list(cutter(window).batches([FEATURES, LABELS], starts, 9))
    assert [len(y) for _, y in found] == [len(some) for some in torch.split(starts, 9)]
    for (x, y), some in zip(found, torch.split(starts, 9), strict=True):
        wanted = [FEATURES[s : s + window] if window else FEATURES[s] for s in some.tolist()]
        assert torch.equal(x, torch.stack(wanted))
        assert torch.equal(y, LABELS[some + (window or 1) - 1])
        for one, other in zip(cutter(window).cut([FEATURES, LABELS], some), (x, y), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("at_once", "size", "gathers"),
    [
        (LABELS.nbytes, 10, [10, 10, 10, 10, 40]),
        (2 * 10 * 24, 10, [20, 20, 40]),
        (2 * 10 * 24, 7, [7, 7, 7, 7, 7, 5, 7, 7, 7, 7, 7, 5]),  # batches that would not lie where compiled models want
    ],
)
def test_as_many_batches_are_gathered_at_once_as_may_be(
    at_once: int, size: int, gathers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hdf5_samples, "AT_ONCE_BYTES", at_once)
    gathered: dict[bool, list[int]] = {False: [], True: []}
    plain = Cutter._gathered

    def counted(self: Cutter, samples: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        gathered[samples is LABELS].append(len(starts))
        return plain(self, samples, starts)

    monkeypatch.setattr(Cutter, "_gathered", counted)
    list(cutter(None).batches([FEATURES, LABELS], torch.arange(ROWS), size))
    assert gathered[False] + gathered[True] == gathers
