import pytest

from fulltilt.diagnosis import answer
from fulltilt.diagnosis.evidence import gather
from fulltilt.diagnosis.rules.ranks import communication_bound, find_unused_parameters, straggler
from fulltilt.diagnosis.rules.training_loop import validation_heavy
from fulltilt.records import Abstention, CommunicationRecord, Finding, HotLine, Run, UnusedSearchRecord
from tests.diagnosis.examples import gpu_rank, run_of, spans_of


def found(judgement: object) -> Finding:
    assert isinstance(judgement, Finding)
    return judgement


def pair(first: dict[str, float], second: dict[str, float], **changes: object) -> Run:
    lines = (HotLine("train.py:90", "draw", 30.0, "plot(images)"),)
    ranks = (gpu_rank(0, world_size=2, **changes), gpu_rank(1, world_size=2, host_lines=lines, **changes))
    return run_of(*ranks, spans=(spans_of(**first), spans_of(**second)))


EVEN = {"compute": 95.0, "communication": 5.0}


def test_the_late_rank_is_named_with_what_it_does_more() -> None:
    run = pair({"compute": 60.0, "communication": 40.0}, {"compute": 60.0, "host_code": 35.0, "communication": 5.0})
    finding = found(straggler(gather(run)))
    assert finding.share == pytest.approx(35 / 100)
    assert finding.evidence[:3] == (
        "for 35 % of the time after start-up the other ranks wait for rank 1",
        "it works 95 ms a step, the others 60 ms",
        "the script's own code takes 35 ms a step more on rank 1",
    )
    assert finding.where == "train.py:90"
    assert finding.predicted_speedup == (1.21, 1.54)
    assert communication_bound(gather(run)) is None
    assert answer(run).verdict.code == "straggler"
    assert "host_code" not in [finding.code for finding in answer(run).findings]  # the same line, as a mean
    assert [r.rank for r in answer(run).ranks if r.slowest] == [1]


def test_balancing_wins_no_more_than_the_slowest_rank_over_the_mean() -> None:
    """2.6 times as fast was promised; the long texts went to the other rank, and it was 1.2 times."""
    run = pair({"compute": 35.0, "communication": 65.0}, {"compute": 95.0, "communication": 5.0})
    finding = found(straggler(gather(run)))
    assert finding.share == pytest.approx(60 / 100)
    assert finding.predicted_speedup == (1.18, 1.43)  # 100 s, or 30 s less: both work 65 s
    assert finding.evidence[-1] == "evenly divided, each rank would work 65 ms a step"
    own = pair({"compute": 35.0, "communication": 65.0}, {"compute": 35.0, "data_wait": 60.0, "communication": 5.0})
    assert found(straggler(gather(own))).predicted_speedup == (1.43, 2.5)


def test_one_rank_that_validates_alone_holds_up_the_others() -> None:
    """30 % of the ledger, the mean of two ranks, were 61 % of the job."""
    run = pair({"compute": 36.0, "communication": 64.0}, {"compute": 39.0, "validation": 60.0, "communication": 1.0})
    finding = found(validation_heavy(gather(run)))
    assert finding.share == pytest.approx(60 / 100)
    assert "only rank 1 validates, and the others wait for it: the ledger's 30 % are the mean" in finding.evidence
    assert "its share falls from 60 % to" in finding.fix
    assert "Divide it among the ranks" in finding.fix
    assert finding.predicted_speedup is not None
    assert finding.predicted_speedup[1] > 2.0
    both = pair({"compute": 70.0, "validation": 30.0}, {"compute": 70.0, "validation": 30.0})
    assert "Divide" not in found(validation_heavy(gather(both))).fix


def test_exposed_exchange_is_communication() -> None:
    record = CommunicationRecord(communication_s=0.06, overlapped_s=0.02)
    run = pair({"compute": 60.0, "communication": 40.0}, {"compute": 62.0, "communication": 38.0}, communication=record)
    finding = found(communication_bound(gather(run)))
    assert finding.share == pytest.approx(38 / 100)
    assert "of 60 ms of exchange a step, 20 ms are overlapped" in finding.evidence
    assert "2 ranks on 1 machine" in finding.evidence
    assert "(k = 4: 38 % → 13 %)" in finding.fix
    assert finding.predicted_speedup == (1.17, 1.4)
    assert straggler(gather(run)) is None


def test_ranks_that_exchange_by_themselves_get_no_advice_on_ddp() -> None:
    run = pair({"compute": 60.0, "communication": 40.0}, {"compute": 62.0, "communication": 38.0})
    fix = found(communication_bound(gather(run))).fix
    assert "in one tensor" in fix
    assert "no_sync" not in fix


def test_even_ranks_are_left_alone() -> None:
    assert straggler(gather(pair(EVEN, EVEN))) is None
    assert communication_bound(gather(pair(EVEN, EVEN))) is None
    alone = run_of(gpu_rank())
    assert straggler(gather(alone)) is None
    assert communication_bound(gather(alone)) is None


@pytest.mark.parametrize("rule", [straggler, communication_bound])
def test_missing_ranks_or_an_unmeasured_exchange_are_not_judged(rule: object) -> None:
    assert callable(rule)
    missing = run_of(gpu_rank(world_size=4))
    assert rule(gather(missing)) == Abstention(rule.__name__, "the records of all 4 ranks (there are 1)")
    unmeasured = pair({"compute": 100.0}, {"compute": 100.0})
    assert rule(gather(unmeasured)) == Abstention(rule.__name__, "the time that the ranks spent exchanging gradients")


def test_a_search_for_unused_parameters_that_never_found_any_is_a_remark() -> None:
    run = pair(EVEN, EVEN, unused_search=UnusedSearchRecord("train.py:40", asked=6, unused_bytes=0))
    finding = found(find_unused_parameters(gather(run)))
    assert (finding.where, finding.severity, finding.predicted_speedup) == ("train.py:40", "info", None)
    assert "found none in 12 steps that were checked" in finding.evidence[0]
    assert answer(run).verdict.code == "compute_bound"


def test_a_search_that_found_something_on_any_rank_is_needed() -> None:
    ranks = [
        gpu_rank(number, world_size=2, unused_search=UnusedSearchRecord("train.py:40", 6, unused_bytes=4 * number))
        for number in (0, 1)
    ]
    run = run_of(*ranks, spans=(spans_of(**EVEN), spans_of(**EVEN)))
    assert find_unused_parameters(gather(run)) is None
    assert find_unused_parameters(gather(pair(EVEN, EVEN))) is None


def test_nothing_is_called_healthy_while_the_collectives_of_sharded_parameters_are_unmeasured() -> None:
    run = pair(EVEN, EVEN, sharded=True)
    assert "compute_bound" in {abstention.code for abstention in answer(run).abstained}
    assert answer(run).verdict.code == "unexplained"
    assert "wait for each other's parameters" in answer(run).verdict.sentence
    alone = run_of(gpu_rank(0, sharded=True), spans=(spans_of(compute=100.0),))
    assert answer(alone).verdict.code == "compute_bound"


@pytest.mark.parametrize("exposed", [11.0, 20.0, 35.0, 49.0])
def test_exposed_communication_of_sharded_ranks_comes_before_compute(exposed: float) -> None:
    record = CommunicationRecord()
    shares = {"compute": 100.0 - exposed, "communication": exposed}
    assert answer(pair(shares, shares, sharded=True, communication=record)).verdict.code == "communication_bound"


def test_sharded_ranks_are_told_how_to_gather_less() -> None:
    run = pair({"compute": 60.0, "communication": 40.0}, {"compute": 60.0, "communication": 40.0}, sharded=True)
    finding = found(communication_bound(gather(run)))
    assert finding.fix.startswith("Gather less: reshard_after_forward=False")
    assert "no_sync" not in finding.fix
    assert answer(run).verdict.sentence.startswith("Communication-bound: gathering parameters takes 40 %")
