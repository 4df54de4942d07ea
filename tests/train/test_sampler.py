"""Global batches: the same whatever the number of ranks, each sample once."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fulltilt.feed.random_numbers import mix
from fulltilt.train.sampler import EpochPlan, RankBatches

plans = st.builds(
    EpochPlan,
    samples=st.integers(1, 60),
    batch_size=st.integers(1, 12),
    accumulation=st.integers(1, 4),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 5),
    drop_last=st.booleans(),
)


def steps_of(plan: EpochPlan, world: int) -> list[list[list[int]]]:
    """For each step the sample ids of each rank."""
    ranks = [RankBatches(replace(plan, rank=rank, world_size=world)) for rank in range(world)]
    drawn = [iter(rank) for rank in ranks]
    return [
        [
            [index for _ in range(len(rank.plan.shares(step))) for _, index in next(batches)]
            for rank, batches in zip(ranks, drawn, strict=True)
        ]
        for step in range(plan.steps)
    ]


@given(plans, st.integers(1, 5))
def test_the_global_batches_do_not_depend_on_the_ranks(plan: EpochPlan, world: int) -> None:
    alone = [sorted(ids) for [ids] in steps_of(plan, 1)]
    together = [sorted(index for ids in ranks for index in ids) for ranks in steps_of(plan, world)]
    assert together == alone
    assert [sorted(plan.order()[slice(*plan.span(step))].tolist()) for step in range(plan.steps)] == alone


@given(plans, st.integers(1, 5))
def test_every_sample_is_used_exactly_once(plan: EpochPlan, world: int) -> None:
    used = sorted(index for ranks in steps_of(plan, world) for ids in ranks for index in ids)
    if plan.drop_last:
        assert len(used) == len(set(used)) == plan.steps * plan.step_samples
    else:
        assert used == list(range(plan.samples))


@given(plans, st.integers(1, 3), st.integers(1, 8), st.data())
def test_going_on_in_the_middle_with_another_batch_and_other_ranks(
    plan: EpochPlan, world: int, batch_size: int, data: st.DataObject
) -> None:
    plan = replace(plan, drop_last=False)
    done = data.draw(st.integers(0, plan.steps))
    first = [index for ranks in steps_of(plan, 1)[:done] for ids in ranks for index in ids]
    rest = replace(plan, start=plan.span(done)[0] if done < plan.steps else plan.samples, batch_size=batch_size)
    second = [index for ranks in steps_of(rest, world) for ids in ranks for index in ids]
    assert sorted(first + second) == list(range(plan.samples))


@given(plans)
def test_shares_differ_by_at_most_one(plan: EpochPlan) -> None:
    for step in range(plan.steps):
        sizes = [
            [high - low for low, high in replace(plan, rank=rank, world_size=3).shares(step)][:1] or [0]
            for rank in range(3)
        ]
        assert max(sizes)[0] - min(sizes)[0] <= 1


def test_epochs_and_seeds_give_other_orders() -> None:
    plan = EpochPlan(samples=50, batch_size=10)
    orders = {tuple(replace(plan, seed=s, epoch=e).order().tolist()) for s in range(4) for e in range(4)}
    assert len(orders) == 16
    assert replace(plan, shuffle=False).order().tolist() == list(range(50))


def test_neighbouring_seeds_do_not_meet() -> None:
    assert len({mix(s, e, i) for s in range(10) for e in range(10) for i in range(100)}) == 10_000
    assert mix(0, 1) != mix(1, 0)
