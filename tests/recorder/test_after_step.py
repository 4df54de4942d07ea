"""What follows an optimizer's step, told by what comes after it."""

from __future__ import annotations

import pytest

from fulltilt.recorder.intervals import IntervalBuilder
from fulltilt.recorder.marks import Activity, BackwardBegan, Mark
from fulltilt.recorder.steps import AfterStep

BATCH, FORWARD, BACKWARD = Activity.DATA_WAIT, Activity.USER, Activity.BACKWARD
STEP, SAVE = Activity.OPTIMIZER, Activity.CHECKPOINT


def after_ten_rounds(*order: tuple[Activity, int]) -> AfterStep:
    """A loop of activities, each of which lasts so long."""
    builder, now_ns = IntervalBuilder(0), 0
    for _ in range(10):
        for activity, ns in order:
            builder.feed(Mark(now_ns, activity, BackwardBegan() if activity is BACKWARD else None))
            now_ns += ns
    return builder.after_step


PLAIN = ((BATCH, 1), (FORWARD, 9), (BACKWARD, 9), (STEP, 2), (FORWARD, 5))
WITHOUT_LOADER = ((FORWARD, 9), (BACKWARD, 9), (STEP, 2))
GAN = ((BATCH, 1), (FORWARD, 9), (BACKWARD, 9), (STEP, 2), (FORWARD, 40), (BACKWARD, 9), (STEP, 2), (FORWARD, 1))
GAN_AVERAGED = (*GAN[:-1], (FORWARD, 40))
SAVING = ((BATCH, 1), (FORWARD, 9), (BACKWARD, 9), (STEP, 2), (FORWARD, 5), (SAVE, 9), (FORWARD, 1))


@pytest.mark.parametrize(
    ("order", "in_model_share", "own"),
    [
        (PLAIN, 0.0, True),
        (WITHOUT_LOADER, 0.0, False),
        (WITHOUT_LOADER, 0.99, False),
        (GAN, 0.9, False),
        (GAN_AVERAGED, 0.45, True),
        (SAVING, 0.0, False),
        ((), 0.0, False),
    ],
    ids=["plain", "no loader", "no loader, all in the model", "GAN", "GAN, averaged", "saves always", "nothing yet"],
)
def test_it_is_the_scripts_own_where_no_forward_pass_can_be_in_it(
    order: tuple[tuple[Activity, int], ...], in_model_share: float, own: bool
) -> None:
    assert after_ten_rounds(*order).is_the_scripts_own(in_model_share) is own


def test_a_mark_in_the_middle_does_not_end_a_stretch() -> None:
    builder = IntervalBuilder(0)
    for now_ns, activity in enumerate((BACKWARD, STEP, FORWARD, None, FORWARD, None, BATCH)):
        builder.feed(Mark(10 * now_ns, activity, BackwardBegan() if activity is BACKWARD else None))
    assert builder.after_step == AfterStep(to_batch_ns=40.0)
