"""What live tuning did stands in the settings and in the verdict."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fulltilt.diagnosis import answer
from fulltilt.diagnosis.evidence import gather
from fulltilt.diagnosis.rules.live_tuning import live_settings, live_words
from fulltilt.records import Diagnosis, HotLine, LiveMove, LiveRecord, Settings
from tests.diagnosis.examples import loader, machine, rank, run_of, workers

BEFORE = Settings(num_workers=0, pin_memory=False)
AFTER = Settings(num_workers=7, prefetch_factor=2, pin_memory=False, persistent_workers=True)
TUNED = LiveRecord(
    0,
    "settled",
    "the loader is no longer the limit",
    BEFORE,
    AFTER,
    before_batches_per_s=20.0,
    before_wait_share=0.83,
    batches_per_s=88.0,
    wait_share=0.02,
)


def test_the_settings_say_what_was_and_what_is() -> None:
    settings = dict(live_settings(TUNED))
    assert settings["live"] == "settled"
    assert settings["live.num_workers"] == "0 → 7"
    assert settings["live.persistent_workers"] == "default → on"
    assert "live.prefetch_factor" not in settings  # 2 is what torch has anyway
    assert "live.pin_memory" not in settings
    assert live_settings(None) == ()


def test_the_words_give_the_gain() -> None:
    words = live_words(TUNED)
    assert "num_workers 0 → 7" in words
    assert "4.4 × as many batches a second" in words
    assert "data wait 83 % → 2" in words
    assert "persistent_workers default → on (each of 2 ranks);" in live_words(replace(TUNED, ranks=2))


def test_a_loader_that_was_left_alone_says_why() -> None:
    alone = replace(TUNED, state="left_alone", why="its data set draws random numbers", settings=BEFORE)
    assert live_words(alone) == "live tuning left the loader alone: its data set draws random numbers"
    assert live_words(replace(alone, state="settled", why="no need")) == "live tuning changed nothing: no need"
    drawn = replace(alone, state="settled", why="nothing paid", note="other random numbers")
    assert live_words(drawn) == "live tuning kept the script's settings: nothing paid; other random numbers"


def test_without_auto_there_is_nothing() -> None:
    assert gather(run_of(rank(), compute=100.0)).live is None


FOUR = Settings(num_workers=4, prefetch_factor=2, pin_memory=False, persistent_workers=True)
SIX = replace(FOUR, num_workers=6)
KEPT = LiveMove(FOUR, 5.0, "kept", batches_per_s=60.0, wait_share=0.28)
CUT_OFF = LiveRecord(
    1,
    "trying",
    "trying 6 workers, prefetch 2",
    BEFORE,
    FOUR,
    before_batches_per_s=20.0,
    before_wait_share=0.85,
    batches_per_s=60.0,
    wait_share=0.28,
    moves=(KEPT, LiveMove(SIX, 12.0)),
)


def judged(live: LiveRecord, num_workers: int = 4, **work: Any) -> Diagnosis:
    """A job that waited half of its 100 s, with this record of live tuning."""
    at_work = loader(num_workers=num_workers, prefetch_factor=2, persistent_workers=True, wait_s=47.0, wait_cpu_s=1.0)
    record = rank(loaders=(at_work,), workers=(workers(**work),), live=(live,))
    return answer(run_of(record, on=machine(8.0), data_wait=47.0, compute=53.0))


def test_a_lock_that_workers_share_is_told_whatever_number_of_them_was_kept() -> None:
    """Three workers were kept for 1.03 times, and the lock was not named any more."""
    lock = HotLine("data.py:16", "D.__getitem__", 150.0, "with self.lock", waits=True)
    made = rank(
        loaders=(loader(num_workers=4, wait_s=60.0),),
        workers=(workers(lines=(lock,)),),
        live=(CUT_OFF,),
    )
    finding = answer(run_of(made, on=machine(8.0), data_wait=60.0, compute=40.0)).findings[0]
    assert finding.fix.startswith("with self.lock at data.py:16 lets one process at a time through")
    assert any("live tuning tried 4 workers" in fact for fact in finding.evidence)


def test_a_run_that_ends_in_a_trial_tells_what_was_proven_and_what_was_not() -> None:
    told = judged(CUT_OFF)
    finding = told.findings[0]
    assert finding.code == "input_serial"  # what the script does; the four workers are live tuning's
    assert "DataLoader(..., num_workers=4, persistent_workers=True)" in finding.fix
    assert (
        "as the script has it (no workers): 20 batches/s, waiting for data 85 % of the measured time"
        in finding.evidence
    )
    assert not any("6 workers" in fact for fact in finding.evidence)
    sentence = told.verdict.sentence
    assert sentence.startswith("Data loading, no workers in the script: ")
    assert all(
        part in sentence
        for part in ("num_workers 0 → 4", "3.0 × as many", "6 workers, prefetch 2 were on trial at the end")
    )
    assert "as fast" not in sentence  # the rate of the whole run belongs to none of the settings
    assert dict(told.settings)["live.why"] == "6 workers, prefetch 2 were on trial at the end"


def test_a_trial_of_which_nothing_could_be_told_says_why() -> None:
    why = "the job itself became 20 % slower meanwhile"
    untold = LiveMove(SIX, 12.0, "returned", batches_per_s=61.0, wait_share=0.27, why=why)
    done = replace(CUT_OFF, state="settled", why="no other setting promises more", moves=(KEPT, untold))
    assert any(fact.endswith(f"not kept ({why})") for fact in judged(done).findings[0].evidence)
    nothing = replace(done, settings=BEFORE, moves=(untold,))
    assert live_words(nothing) == "live tuning changed nothing: no other setting promises more"


def test_a_trial_that_was_not_compared_yet_is_one_on_trial() -> None:
    measured = LiveMove(SIX, 12.0, batches_per_s=61.0, wait_share=0.27)
    told = judged(replace(CUT_OFF, moves=(KEPT, measured)))
    assert "6 workers, prefetch 2 were on trial at the end" in told.verdict.sentence
    assert any("6 workers" in fact and fact.endswith("on trial at the end") for fact in told.findings[0].evidence)


def test_what_is_predicted_is_a_run_that_begins_with_what_was_found() -> None:
    # 1000 batches would wait 0.09 / 19 s each: 4.7 s of the 47 are left.
    enough = replace(CUT_OFF, batches_per_s=19.0, wait_share=0.09)
    low, high = judged(enough).findings[0].predicted_speedup or (0.0, 0.0)
    assert high == 1.73
    assert 1.2 < low < high


def test_where_no_setting_is_enough_a_cheaper_fetch_wins_the_rest() -> None:
    finding = judged(CUT_OFF).findings[0]
    assert "28 % of the measured time with 4 workers, prefetch 2: make decode (dataset.py:48) cheaper" in finding.fix
    low, high = finding.predicted_speedup or (0.0, 0.0)
    assert high == 1.89  # all of the waiting
    assert 1.2 < low < high


def test_only_lines_of_the_users_that_cost_much_are_to_be_made_cheaper() -> None:
    """`Collection.__subclasshook__ (<frozen _collections_abc>:409)` was to be made cheaper."""
    lines = (
        HotLine("<frozen _collections_abc>:409", "Collection.__subclasshook__", 90.0),
        HotLine("site/tool.py:3", "read", 90.0, inside="site/tool.py:load"),
        HotLine("dataset.py:48", "decode", 1.0),
    )
    for line in lines:
        fix = judged(CUT_OFF, lines=(line,)).findings[0].fix
        assert "4 workers, prefetch 2: make the data set Photos cheaper" in fix


def test_settings_that_were_tried_and_did_not_pay_are_not_advised() -> None:
    four = replace(FOUR, persistent_workers=None)
    slower = LiveMove(replace(FOUR, num_workers=6), 5.0, "returned", batches_per_s=58.0, wait_share=0.3)
    settled = replace(CUT_OFF, state="settled", why="no more", before=four, settings=four, moves=(slower,))
    ((fix, gain),) = (
        (finding.fix, finding.predicted_speedup)
        for finding in judged(settled).findings
        if finding.code.startswith("input")
    )
    assert fix.startswith("Leave the loader at train.py:31 at 4 workers, prefetch 2: live tuning tried")
    assert "make decode (dataset.py:48) cheaper" in fix
    assert gain == (1.31, 1.89)  # of that, not of leaving the loader as it is


def test_a_trial_that_never_ended_leaves_the_rules_their_advice() -> None:
    first = replace(CUT_OFF, settings=BEFORE, moves=(LiveMove(FOUR, 5.0),))
    told = judged(first, num_workers=0)
    assert "Set num_workers=" in told.findings[0].fix
    assert "live tuning: 4 workers, prefetch 2 were on trial at the end" in told.verdict.sentence
    assert "changed nothing" not in told.verdict.sentence


def test_a_first_trial_that_never_ended_mixes_the_figures_of_the_workers() -> None:
    first = replace(CUT_OFF, before=FOUR, settings=FOUR, moves=(LiveMove(SIX, 5.0),))
    finding = judged(first).findings[0]
    assert "only begun to try 6 workers, prefetch 2" in finding.fix
    failed = replace(first, state="settled", moves=(LiveMove(SIX, 5.0, "failed", why="it broke"),))
    assert "only begun" not in judged(failed).findings[0].fix
    assert finding.predicted_speedup == (1.31, 1.89)  # half of the waiting, or all of it


def test_what_made_live_tuning_leave_a_loader_alone_comes_before_the_advice() -> None:
    alone = LiveRecord(1, "left_alone", "the script changes its data set during a pass", before=FOUR, settings=FOUR)
    fix = judged(alone).findings[0].fix
    assert fix.startswith("Live tuning left this loader alone: the script changes its data set during a pass. After")
    assert "num_workers=" in fix


def test_what_a_loader_that_was_left_alone_had_before_is_not_advised() -> None:
    """The verdict said that it was left alone, and the fix to write down what live tuning had found."""
    broke = replace(CUT_OFF, state="left_alone", why="4 workers failed", moves=(KEPT,))
    told = judged(broke, num_workers=0)
    assert "live tuning left the loader alone: 4 workers failed" in told.verdict.sentence
    assert told.findings[0].fix.startswith("Live tuning left this loader alone: 4 workers failed.")
    assert not any("Write what live tuning found" in finding.fix for finding in told.findings)
    assert not any(name == "live.num_workers" for name, _ in told.settings)


def test_other_random_numbers_are_told_in_the_verdict_and_in_the_settings() -> None:
    drawing = replace(TUNED, note="the data set draws random numbers")
    assert live_words(drawing).endswith("; the data set draws random numbers")
    assert dict(live_settings(drawing))["live.note"] == "the data set draws random numbers"
