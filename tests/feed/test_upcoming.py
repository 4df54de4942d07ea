"""Each epoch gets its own order, whoever drew it."""

from __future__ import annotations

import threading

import pytest
import torch

from fulltilt.feed.upcoming import UpcomingOrder


def test_the_next_epoch_is_drawn_beside_this_one_and_others_when_they_are_asked_for() -> None:
    drawn: list[tuple[int, bool]] = []

    def draw(epoch: int) -> torch.Tensor:
        drawn.append((epoch, threading.current_thread() is threading.main_thread()))
        return torch.full((3,), epoch)

    orders = UpcomingOrder(draw, torch.device("cpu"))
    for epoch in (0, 1, 7, 8):
        assert orders.of(epoch).tolist() == [epoch] * 3
    orders.close()
    assert drawn[0] == (0, True)
    assert {epoch for epoch, here in drawn if here} == {0, 7}
    assert {epoch for epoch, here in drawn if not here} == {1, 2, 8, 9}


def test_what_goes_wrong_while_drawing_is_told_when_the_order_is_used() -> None:
    def draw(epoch: int) -> torch.Tensor:
        if epoch == 1:
            raise ValueError("no such epoch")
        return torch.arange(2)

    orders = UpcomingOrder(draw, torch.device("cpu"))
    orders.of(0)
    with pytest.raises(ValueError, match="no such epoch"):
        orders.of(1)
    orders.close()
