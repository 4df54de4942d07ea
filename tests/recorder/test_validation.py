"""An evaluation is over when the function that drew its batches has returned, not when the next training begins."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import fulltilt
from fulltilt.diagnosis import answer
from fulltilt.recorder.session import Session
from fulltilt.recorder.stacks.frames import Stack, stack_of
from fulltilt.recorder.validation import Evaluation, function_that_draws, function_that_switches


def here() -> Stack:
    stack = stack_of(threading.get_ident())
    assert stack is not None
    return stack


def validated(evaluation: Evaluation) -> bool:
    evaluation.drew(sys._getframe())
    return evaluation.goes_on(here())


@pytest.fixture
def evaluation() -> Evaluation:
    found = Evaluation()
    found.switched(torch.nn.Linear(1, 1), None)
    return found


def test_it_goes_on_in_the_function_that_drew_and_is_over_behind_it(evaluation: Evaluation) -> None:
    assert validated(evaluation)
    assert not evaluation.goes_on(here())


def test_a_metric_behind_the_function_that_drew_belongs_to_it(evaluation: Evaluation) -> None:
    def scored() -> bool:
        evaluation.switched(torch.nn.Linear(1, 1).eval(), sys._getframe())
        validated(evaluation)
        return evaluation.goes_on(here())  # as the metric is computed

    assert scored()
    assert not evaluation.goes_on(here())


def test_the_line_of_the_loop_that_leads_to_it_is_named(evaluation: Evaluation) -> None:
    def validate() -> None:
        evaluation.drew(sys._getframe(), loop=frozenset({train.__code__}))

    def train() -> None:
        validate()

    train()
    assert evaluation.where is not None
    assert evaluation.where.endswith(f"test_validation.py:{train.__code__.co_firstlineno + 1}")


def test_a_library_may_run_the_validation_by_the_function_that_runs_the_training() -> None:
    """ignite's Engine: its inner call, at an earlier line, was taken for the next iteration of the training."""
    evaluation, went_on = Evaluation(), []

    def run(trains: bool) -> None:
        if not trains:
            evaluation.drew(sys._getframe(), loop)
            went_on.append(evaluation.goes_on(here()))
            return
        evaluation.switched(torch.nn.Linear(1, 1).eval(), sys._getframe(), loop)
        run(trains=False)

    loop = frozenset({run.__code__})
    run(trains=True)
    assert went_on == [True]


def test_it_is_over_when_a_loop_around_it_comes_round_again(evaluation: Evaluation) -> None:
    def train_folds() -> None:
        for fold in range(2):
            asked.append(evaluation.goes_on(here()))  # as the features of this fold are made
            if fold == 0:
                evaluation.switched(model, sys._getframe(), loop=frozenset({train_folds.__code__}))
                asked.append(evaluation.goes_on(here()))

    model = torch.nn.Linear(1, 1).eval()
    asked: list[bool] = []
    train_folds()
    assert asked[1:] == [True, False]


def test_a_loop_that_draws_before_the_switch_still_evaluates(evaluation: Evaluation) -> None:
    def run() -> None:
        loop = frozenset({run.__code__})
        for batch in range(3):
            if batch:
                evaluation.drew(sys._getframe(), loop)
                asked.append(evaluation.goes_on(here()))
            else:
                evaluation.switched(model, sys._getframe(), loop)

    model = torch.nn.Linear(1, 1).eval()
    asked: list[bool] = []
    run()
    assert asked == [True, True]


def test_the_function_that_switches_a_model_is_the_scripts_and_not_the_models_own() -> None:
    class Frozen(torch.nn.Linear):
        def train(self, mode: bool = True) -> Frozen:
            found.append(function_that_switches(self, sys._getframe()))
            return super().train(mode)

    def validates() -> None:
        model.eval()

    found: list[object] = []
    model = Frozen(1, 1)
    validates()
    assert found == [validates.__code__]


def test_a_library_that_switches_a_model_tells_nothing_of_the_script(tmp_path: Path) -> None:
    library = "import sys\ndef switch(ask, model):\n    return ask(model, sys._getframe())\n"
    names: dict[str, Callable[..., object]] = {}
    exec(compile(library, str(tmp_path / "site-packages" / "trainer.py"), "exec"), names)
    assert names["switch"](function_that_switches, torch.nn.Linear(1, 1)) is None


def test_it_goes_on_where_a_model_is_called_behind_it(evaluation: Evaluation) -> None:
    class Sampled(torch.nn.Module):
        def forward(self) -> bool:
            return evaluation.goes_on(here())

    validated(evaluation)
    assert Sampled()() is True


def test_it_is_over_once_the_model_trains_again_though_nobody_called_train() -> None:
    model, evaluation = torch.nn.Linear(1, 1), Evaluation()
    model.training = False
    evaluation.switched(model, None)
    assert evaluation.in_sight
    assert evaluation.goes_on(here())
    model.training = True  # as Lightning does
    assert not evaluation.goes_on(here())


def test_what_the_user_declares_ends_where_the_user_says_so(evaluation: Evaluation) -> None:
    evaluation.declare(True)
    validated(evaluation)
    assert not evaluation.in_sight


def test_a_generator_hands_batches_on_and_is_not_the_function_that_draws() -> None:
    def handed_on() -> Iterator[object]:
        yield function_that_draws(sys._getframe())

    def draws() -> object:
        return next(handed_on())

    assert draws() is draws.__code__


@pytest.mark.quiet
def test_what_follows_a_validation_in_eval_mode_is_the_scripts_own_code(tmp_path: Path) -> None:
    """By the stopwatch of the job itself; a neighbour on the machine may take a little of it."""
    samples = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    trained, evaluated = DataLoader(samples, batch_size=8), DataLoader(samples, batch_size=8)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    took = dict.fromkeys(("validation", "host_code"), 0.0)

    def timed(name: str, work: Callable[[], None]) -> None:
        began = time.perf_counter()
        work()
        took[name] += time.perf_counter() - began

    def train() -> None:
        model.train()
        for inputs, labels in trained:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), labels).backward()
            optimizer.step()

    @torch.no_grad()
    def validate() -> None:
        model.eval()
        for inputs, _ in evaluated:
            model(inputs)
            time.sleep(0.02)
        time.sleep(0.1)  # a metric

    with fulltilt.record(tmp_path / "run"):
        for _ in range(3):
            train()
            timed("validation", validate)
            timed("host_code", lambda: time.sleep(0.5))
        train()
    buckets = answer(fulltilt.load(tmp_path / "run")).ledger.buckets
    assert buckets.validation_s == pytest.approx(took["validation"], rel=0.25)
    assert buckets.host_code_s == pytest.approx(took["host_code"], rel=0.15)


def test_a_model_switched_for_the_batch_under_way_generates_and_validates_no_more(tmp_path: Path) -> None:
    session = Session(torch, tmp_path, time.perf_counter_ns())
    session.begin_here()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train, held_out = (DataLoader(TensorDataset(torch.zeros(12, 1)), batch_size=2) for _ in range(2))

    def generate() -> bool:
        model.eval()
        taken_for_evaluation = session.recorder.eval_mode
        model.train()
        return taken_for_evaluation

    def validate() -> bool:
        model.eval()
        taken_for_evaluation = session.recorder.eval_mode
        list(held_out)
        model.train()
        return taken_for_evaluation

    generating, validating = [], []
    try:
        for (batch,) in train:
            generating.append(generate())
            if len(generating) > 1:
                validating.append(validate())
            model(batch).sum().backward()
            optimizer.step()
    finally:
        session.finish()
    # The first step makes the model known.
    assert generating == [False, True, True, True, False, False]
    assert validating == [True] * 5


Work = Callable[[torch.nn.Module], None]


@torch.no_grad()
def compute_long(model: torch.nn.Module) -> None:
    began = time.perf_counter()
    while time.perf_counter() < began + 0.1:  # longer than a step
        model(torch.zeros(1, 1))


class Noting(TensorDataset):
    """Computes with gradients off in the training process, as some data sets do."""

    @torch.no_grad()
    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return super().__getitem__(index)


def validated_s(tmp_path: Path, before_forward: Work | None = None, after_step: Work | None = None) -> float:
    """The validation told of a training of 16 steps that works before the model or after each second step."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Noting(torch.zeros(8, 1)), batch_size=2)
    with fulltilt.record(tmp_path / "run"):
        for _ in range(4):
            for number, (batch,) in enumerate(loader):
                if before_forward is not None:
                    before_forward(model)
                model(batch).sum().backward()
                optimizer.step()
                if after_step is not None and number % 2:
                    after_step(model)
    return answer(fulltilt.load(tmp_path / "run")).ledger.buckets.validation_s


def test_long_work_with_gradients_off_after_a_step_is_validation(tmp_path: Path) -> None:
    took_s = 0.0

    def timed(model: torch.nn.Module) -> None:
        nonlocal took_s
        began = time.perf_counter()
        compute_long(model)
        took_s += time.perf_counter() - began

    assert validated_s(tmp_path, after_step=timed) == pytest.approx(took_s, rel=0.1)


def test_long_work_at_each_step_of_two_optimizers_is_no_validation(tmp_path: Path) -> None:
    models = [torch.nn.Linear(1, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    with fulltilt.record(tmp_path / "run"):
        for (batch,) in DataLoader(TensorDataset(torch.zeros(16, 1)), batch_size=2):
            for model, optimizer in zip(models, optimizers, strict=True):
                model(batch).sum().backward()
                optimizer.step()
            compute_long(models[0])
    buckets = answer(fulltilt.load(tmp_path / "run")).ledger.buckets
    assert buckets.validation_s < 2 * 0.1


def test_weights_updated_by_hand_with_gradients_off_are_no_validation(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    with fulltilt.record(tmp_path / "run"):
        for (batch,) in DataLoader(TensorDataset(torch.zeros(16, 1)), batch_size=2):
            model(batch).sum().backward()
            compute_long(model)
    assert answer(fulltilt.load(tmp_path / "run")).ledger.buckets.validation_s == 0.0


def test_a_teacher_with_gradients_off_is_no_validation(tmp_path: Path) -> None:
    assert validated_s(tmp_path, before_forward=compute_long) < 4 * 0.1  # all but the first of 16


def test_short_work_with_gradients_off_is_no_validation(tmp_path: Path) -> None:
    follow = torch.no_grad()(lambda model: None)
    assert validated_s(tmp_path, after_step=follow) < 0.01


def test_rollouts_that_a_new_loader_serves_are_no_validation(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fulltilt.record(tmp_path / "run"):
        for _ in range(4):
            compute_long(model)
            for (batch,) in DataLoader(TensorDataset(torch.zeros(8, 1)), batch_size=2):
                model(batch).sum().backward()
                optimizer.step()
    buckets = answer(fulltilt.load(tmp_path / "run")).ledger.buckets
    assert buckets.validation_s < 0.15  # the first of three


def test_a_loader_drawn_with_gradients_off_is_told_as_before(tmp_path: Path) -> None:
    held_out = DataLoader(TensorDataset(torch.zeros(8, 1)), batch_size=2)

    @torch.no_grad()
    def validate(model: torch.nn.Module) -> None:
        model.eval()
        for (batch,) in held_out:
            model(batch)
        model.train()
        time.sleep(0.1)  # no part of it

    assert validated_s(tmp_path, after_step=validate) < 4 * 0.1
    (rank,) = fulltilt.load(tmp_path / "run").ranks
    assert [loader.eval_batches for loader in rank.loaders] == [0, 32]


LIKE_KERAS = """
from torch.utils.data import DataLoader

def fit(model, made, epochs):
    for _ in range(epochs):
        model.train()
        for rows in DataLoader(made(12), batch_size=2):
            model.zero_grad()
            model(rows).sum().backward()
        model.eval()
        for rows in DataLoader(made(4), batch_size=2):
            model(rows)
"""


class Streamed(IterableDataset[torch.Tensor]):
    """A data set without a length."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.zeros(self.samples, 1))


def test_a_library_with_an_optimizer_and_loaders_of_its_own_validates(tmp_path: Path) -> None:
    names: dict[str, Callable[..., object]] = {}
    exec(compile(LIKE_KERAS, str(tmp_path / "site-packages" / "trainer.py"), "exec"), names)
    session = Session(torch, tmp_path, time.perf_counter_ns())
    session.begin_here()
    try:
        names["fit"](torch.nn.Linear(1, 1), Streamed, epochs=3)
    finally:
        session.finish()
    assert [(stats.batches, stats.eval_batches) for stats in session.loaders.all] == [(18, 0), (6, 6)]
