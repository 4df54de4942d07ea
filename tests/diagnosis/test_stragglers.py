"""Which rank comes last, step by step."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from fulltilt.diagnosis import answer
from fulltilt.diagnosis.stragglers import RankSteps, align
from fulltilt.records import Buckets, Run, Span
from tests.diagnosis.examples import gpu_rank, run_of

STEP_S = 0.1


def run(works: list[list[dict[str, float]]], hosts: str = "aabb") -> Run:
    """Ranks that work in each step as told, and wait for the longest of them."""
    ranks = tuple(gpu_rank(r, world_size=len(works), hostname=hosts[r]) for r in range(len(works)))
    spans = []
    for own in works:
        t_s, made = 0.0, []
        for step, work in enumerate(own):
            longest_s = max(sum(other[step].values()) for other in works)
            buckets = Buckets(**work, communication_s=longest_s - sum(work.values()))
            made.append(Span(t_s, t_s + longest_s, step, 1, 1, 8, buckets))
            t_s += longest_s
        spans.append(tuple(made))
    return run_of(*ranks, spans=tuple(spans))


def even(steps: int = 60) -> list[list[dict[str, float]]]:
    noise = Random(3)
    return [[{"compute_s": STEP_S * noise.uniform(1.0, 1.1)} for _ in range(steps)] for _ in range(4)]


def aligned(made: Run) -> RankSteps:
    steps = align(made)
    assert steps is not None
    return steps


def test_ranks_that_differ_by_chance_are_not_named() -> None:
    steps = aligned(run(even()))
    assert len(steps.events) > 8
    assert steps.steady() == ()
    assert "straggler" not in [finding.code for finding in answer(run(even())).findings]


def test_a_rank_that_is_late_each_fifth_step_is_named() -> None:
    works = even()
    for step in range(0, 60, 5):
        works[2][step]["host_code_s"] = 2 * STEP_S
    finding = next(found for found in answer(run(works)).findings if found.code == "straggler")
    assert finding.evidence[0].endswith("the other ranks wait for rank 2 on b")


def test_a_machine_whose_ranks_are_all_late_is_named() -> None:
    works = even()
    for rank in (2, 3):
        for step in range(60):
            works[rank][step]["compute_s"] *= 1.5
    made = run(works)
    assert aligned(made).steady() == (2, 3)
    finding = next(found for found in answer(made).findings if found.code == "straggler")
    assert "b (ranks 2, 3)" in finding.evidence[0]


def test_data_late_on_any_rank_blames_no_rank() -> None:
    works, choose = even(), Random(5)
    for step in range(60):
        works[choose.randrange(4)][step]["data_wait_s"] = STEP_S
    finding = next(found for found in answer(run(works)).findings if found.code == "straggler")
    assert "not always the same" in finding.evidence[0]
    assert "prefetch_factor" in finding.fix


def test_ranks_that_exchange_nothing_do_not_wait_for_each_other() -> None:
    works, choose = even(), Random(5)
    for step in range(60):
        works[choose.randrange(4)][step]["data_wait_s"] = STEP_S
    made = run(works)
    apart = tuple(
        tuple(replace(span, buckets=replace(span.buckets, communication_s=1e-6)) for span in spans)
        for spans in made.spans
    )
    assert "straggler" not in [found.code for found in answer(replace(made, spans=apart)).findings]


def test_a_rank_is_compared_with_the_fastest_and_its_own_past() -> None:
    works = even()
    for step in range(40, 60):
        works[1][step]["compute_s"] *= 2
    summary = answer(run(works)).ranks[1]
    assert summary.own_past_speed == pytest.approx(0.5, abs=0.05)
    assert summary.relative_speed == pytest.approx(1.0, abs=0.05)


def test_spans_that_end_at_other_steps_are_aligned_by_number() -> None:
    made = run(even())
    joined = tuple(
        Span(a.t0_s, b.t1_s, a.first_step, 2, 2, 16, a.buckets.plus(b.buckets))
        for a, b in zip(made.spans[0][::2], made.spans[0][1::2], strict=True)
    )
    steps = aligned(Run(made.folder, made.run, made.ranks, (joined, *made.spans[1:]), ()))
    assert {window.steps for window in steps.windows} == {2}
