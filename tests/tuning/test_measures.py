"""How sure a rate is, which losses differ, what memory and learning rates do: pure figures."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulltilt.records import Settings, Trial
from fulltilt.tuning import learning_rate
from fulltilt.tuning.memory_line import fit_line, vram_line
from fulltilt.tuning.trial.measure import LoaderSupply, TrainingLoaders
from fulltilt.tuning.trial.outcome import compared_steps, is_worse, mean_loss
from fulltilt.tuning.trial.throughput import Block, Patience, is_enough, rate_of

# --------------------------------------------------------------------------- rates


def test_a_rate_is_all_samples_over_all_seconds() -> None:
    rate = rate_of([Block(100, 1.0), Block(300, 2.0)])
    assert rate is not None
    assert rate.mean == pytest.approx(400 / 3)
    assert rate.low < rate.mean < rate.high
    assert rate_of([]) is None


def test_one_block_is_not_sure_of_anything() -> None:
    rate = rate_of([Block(100, 1.0)])
    assert rate is not None
    assert (rate.low, math.isinf(rate.high)) == (0.0, True)


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    random = Random(1)
    hits = 0
    for _ in range(400):
        blocks = [Block(round(random.gauss(500, 40)), 1.0) for _ in range(8)]
        rate = rate_of(blocks)
        assert rate is not None
        hits += rate.low <= 500 <= rate.high
    assert 0.91 <= hits / 400 <= 0.985


def test_a_trial_stops_as_soon_as_it_knows_and_not_before() -> None:
    patience = Patience(wanted_error=0.02, least_blocks=5, least_s=1.0, most_s=10.0)
    steady = [Block(100, 0.3)] * 5
    assert not is_enough(steady[:4], patience)
    assert is_enough(steady, patience)
    restless = [Block(50, 0.3), Block(150, 0.3)] * 5
    assert not is_enough(restless, patience)
    assert is_enough(restless * 4, patience)  # its time is over


def test_a_trial_that_cannot_win_any_more_stops_early() -> None:
    restless = [Block(80, 0.3), Block(120, 0.3)] * 5  # 333 samples/s, not known well
    assert not is_enough(restless, Patience(to_beat=300.0))
    assert is_enough(restless, Patience(to_beat=900.0))


# --------------------------------------------------------------------------- losses


def test_the_later_half_of_the_common_steps_is_compared() -> None:
    assert compared_steps([1.0] * 40, [1.0] * 20) == range(10, 20)
    assert compared_steps([1.0] * 40, [1.0] * 9) is None
    assert mean_loss([1.0] * 10 + [3.0] * 10, range(10, 20)) == 3.0


def test_a_setting_that_breaks_training_is_told_from_noise() -> None:
    random = Random(0)
    falling = [2.3 * math.exp(-step / 50) + random.gauss(0, 0.05) for step in range(60)]
    again = [2.3 * math.exp(-step / 50) + random.gauss(0, 0.05) for step in range(60)]
    stuck = [2.3 + random.gauss(0, 0.05) for _ in range(60)]
    assert not is_worse(falling, falling)
    assert not is_worse(falling, again)
    assert is_worse(falling, stuck)
    assert not is_worse(stuck, falling)


# --------------------------------------------------------------------------- memory


def test_vram_is_a_line_over_the_batch() -> None:
    trials = [
        Trial(Settings(), "ok", vram_peak_bytes=1000 + 10 * size, in_force=Settings(batch_size=size))
        for size in (8, 16)
    ]
    line = vram_line([*trials, Trial(Settings(), "oom", in_force=Settings(batch_size=999))])
    assert line is not None
    assert (line.fixed_bytes, line.each_bytes) == pytest.approx((1000, 10))
    assert line.most_within(2000) == 100
    assert fit_line([(8, 100), (8, 120)]) is None


# --------------------------------------------------------------------------- learning rates


@pytest.mark.parametrize(
    ("rate", "batch", "new", "optimizer", "deep", "arithmetic"),
    [
        (0.0004, 8, 16, "AdamW", False, "0.0004 × sqrt(16/8) = 0.000566"),
        (0.0004, 8, 12, "Adam", False, "0.0004 × sqrt(12/8) = 0.00049"),
        (0.1, 256, 1024, "SGD", False, "0.1 × 1024/256 = 0.4"),
        (0.00024, 8, 12, "AdamW", True, "0.00024 × sqrt(12/8) × 0.56/0.6 (deep supervision) = 0.000274"),
        (0.00024, 8, 16, "AdamW", True, "0.00024 × sqrt(16/8) × 0.50/0.6 (deep supervision) = 0.000283"),
        (2e-5, 96, 96, "AdamW", False, "0.00002, as it is"),
    ],
)
def test_the_arithmetic_is_printed(
    rate: float, batch: int, new: int, optimizer: str, deep: bool, arithmetic: str
) -> None:
    assert learning_rate.scale(rate, batch, new, optimizer, deep).arithmetic == arithmetic


def test_deep_supervision_lowers_the_rate() -> None:
    factors = [learning_rate.deep_supervision_factor(ratio) for ratio in (1.0, 1.25, 1.5, 2.0, 8.0)]
    assert factors == pytest.approx([0.6, 0.58, 0.56, 0.5, 0.5])


def test_warm_up_is_advised_for_a_rate_that_is_much_higher() -> None:
    assert learning_rate.scale(0.0004, 8, 12).warm_up is None
    advice = learning_rate.scale(0.0004, 8, 32).warm_up
    assert advice is not None
    assert "2 × as high" in advice


@given(st.integers(1, 4096), st.integers(1, 4096))
def test_accumulation_keeps_the_effective_batch(batch: int, fits: int) -> None:
    answer = learning_rate.accumulation_for(batch, fits)
    assert answer is not None
    parts, size = answer
    assert parts * size == batch
    assert size <= fits


def test_contrastive_losses_are_known() -> None:
    assert learning_rate.looks_contrastive("loss = clip_loss(logit_scale * image @ text.T)")
    assert learning_rate.looks_contrastive("class InfoNCE(nn.Module): ...")
    assert not learning_rate.looks_contrastive("torch.nn.utils.clip_grad_norm_(p, 1.0); loss = cross_entropy(x, y)")


def test_deep_supervision_is_seen_in_the_command() -> None:
    assert learning_rate.looks_deeply_supervised(("train_ultimate.py", "train", "--deep-supervision"))
    assert not learning_rate.looks_deeply_supervised(("train.py", "--supervision"))


# --------------------------------------------------------------------------- loaders side by side


@dataclass
class Tap:
    loader_id: int
    trains: bool = False
    batches: int = 0


def test_a_loader_that_is_drawn_from_beside_the_one_that_trains_does_not_interrupt_it() -> None:
    """zip(labelled, unlabelled): backward() comes after a batch of the second; such a trial never measured anything."""
    labelled, unlabelled, validation = Tap(0), Tap(1, trains=True), Tap(2, batches=7)
    company = TrainingLoaders()
    for step in range(20):
        labelled.batches += 1
        unlabelled.batches += 1
        validation.batches += 5 if step % 10 == 9 else 0
        found = company.after_step([labelled, unlabelled, validation])
    assert found == [labelled, unlabelled]


def test_a_job_that_draws_no_more_batches_is_not_waited_for() -> None:
    """itertools.cycle keeps the batches of the first pass; validation and slow steps do not count."""
    never, cycles, slow = LoaderSupply(), LoaderSupply(), LoaderSupply()
    assert not any(never.has_ended(0.1 * step, step, 0) for step in range(150))
    assert never.has_ended(21.0, 210, 0)
    assert not any(cycles.has_ended(0.01 * step, step, step) for step in range(1000))
    assert not cycles.has_ended(14.0, 1400, 999)
    assert cycles.has_ended(15.5, 1550, 999)
    assert not cycles.has_ended(15.6, 1560, 1000)
    assert not any(slow.has_ended(10.0 * step, step, 7) for step in range(40))
