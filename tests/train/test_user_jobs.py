"""Jobs as people write them: what they froze, how they set their rates, what their losses and metrics return."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from fulltilt.errors import Diverged, MachineError, StoppedEarly, UsageError
from fulltilt.store import OwnedFolder
from fulltilt.train import checkpoint, train_state
from fulltilt.train.checkpoint import newest_complete
from fulltilt.train.config import TrainSettings
from fulltilt.train.exit_code import exit_code_of
from fulltilt.train.job import Job, Stage
from fulltilt.train.loop import train
from fulltilt.train.progress import TrainingScreen
from fulltilt.train.step import LossScale
from fulltilt.train.train_state import Outcome, StepEnd
from tests.faults import victim


def run(out: Path, job: Job | None = None, on_step: Any = None, **settings: Any) -> tuple[Outcome, str]:
    screen = TrainingScreen(out, stream=(out.parent / f"{out.name}.txt").open("a"), sampled=False)
    chosen = TrainSettings(**{"device": "cpu", "record": False, "batch_size": 22, **settings})
    try:
        outcome = train(job or victim.make_job(eval_data=None), chosen, out, screen=screen, on_step=on_step)
    finally:
        screen.stream.close()
    return outcome, (out.parent / f"{out.name}.txt").read_text()


def newest(out: Path) -> checkpoint.Checkpoint:
    found = newest_complete(out / "checkpoints").checkpoint
    assert found is not None
    return found


# --------------------------------------------------------------------------- what is trained


def test_what_the_job_has_frozen_stays_frozen(tmp_path: Path) -> None:
    """Seen to fail: with every parameter thawed that no stage froze, the user's frozen layer moved."""
    net = victim.Net()
    net.first.requires_grad_(False)
    before = net.first.weight.clone()
    run(tmp_path / "out", victim.make_job(model=net, eval_data=None), lr=0.1)
    assert torch.equal(net.first.weight, before)
    stages = (Stage("head", 1), Stage("all", 1, unfreeze=((0, "first.weight"),)))
    run(tmp_path / "staged", victim.make_job(model=net, eval_data=None, stages=stages), lr=0.1)
    assert not torch.equal(net.first.weight, before)
    assert not net.first.weight.requires_grad, "the model is given back as it came"


def own_rates(model: Any, settings: TrainSettings, device: torch.device) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": model.first.parameters(), "lr": 0.5}, {"params": model.last.parameters()}], 0.1)


def test_an_optimizer_keeps_the_rates_it_was_made_with(tmp_path: Path) -> None:
    """Seen to fail: the schedule gave every group the rate of the settings."""
    rates: list[list[float]] = []

    def note(end: StepEnd) -> None:
        rates.append([group["lr"] for group in end.state.stepper.optimizer.param_groups])

    job = victim.make_job(optimizer=own_rates, eval_data=None)
    run(tmp_path / "out", job, note, epochs=1, lr=2.0, warmup_steps=2, schedule="constant")
    run(tmp_path / "out", job, note, epochs=2, lr=3.0, warmup_steps=2, schedule="constant")
    assert rates == [pytest.approx(pair) for pair in ([0.25, 0.05], [0.5, 0.1], [0.5, 0.1], [0.5, 0.1])]


def test_settings_that_changed_hold_and_another_optimizer_starts_anew(tmp_path: Path) -> None:
    """Seen to fail: the decay of the checkpoint came back with the optimizer's state, while the user was told of the
    new one; the groups of AdamW ended SGD with a KeyError."""
    decay: list[float] = []

    def note(end: StepEnd) -> None:
        decay.append(end.state.stepper.optimizer.param_groups[0]["weight_decay"])

    run(tmp_path / "out", epochs=1, weight_decay=0.1)
    run(tmp_path / "out", None, note, epochs=2, weight_decay=0.3)
    _, told = run(tmp_path / "out", None, note, epochs=3, optimizer="sgd")
    assert decay == [0.3, 0.3, 0.01, 0.01]
    assert "the optimizer starts from nothing: the checkpoint's is of AdamW, not SGD" in told


class Layers(torch.nn.Module):
    """Layers of equal shape, made in the order of ``names``; the gradients of ``a`` are a hundred times larger."""

    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, torch.nn.Linear(6, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        factors = {"a": 100.0, "b": 1.0, "c": 1.0}
        return torch.cat([layer(inputs) * factors[name] for name, layer in self.named_children()], 1).sum(1)


def layers(names: str, **changes: Any) -> Job:
    return victim.make_job(model=Layers(names), loss=plain_loss, eval_data=None, **changes)


def plain_loss(model: Any, batch: Any) -> torch.Tensor:
    return model(batch[0]).square().mean()  # type: ignore[no-any-return]


def a_group_each(names: str) -> Any:
    def make(model: Any, settings: TrainSettings, device: torch.device) -> torch.optim.Optimizer:
        groups = [{"params": list(getattr(model, name).parameters()), "weight_decay": ord(name)} for name in names]
        return torch.optim.AdamW(groups, 1e-6)

    return make


@pytest.mark.parametrize("grouped", [False, True])
def test_moments_and_groups_follow_the_names_of_their_parameters(tmp_path: Path, grouped: bool) -> None:
    """Seen to fail: two layers changed places in the class, and each went on with the moments of the other."""
    moments: list[dict[str, float]] = []
    decays: list[dict[str, float]] = []

    def note(end: StepEnd) -> None:
        optimizer = end.state.stepper.optimizer
        decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
        named = dict(end.state.model.named_parameters())
        moments.append({name: float(optimizer.state[p]["exp_avg_sq"].mean()) for name, p in named.items()})
        decays.append({name: decay[id(p)] for name, p in named.items()})

    for names, epochs in (("ab", 1), ("ba", 2)):
        own = a_group_each(names) if grouped else None
        run(tmp_path / "out", layers(names, optimizer=own), note, epochs=epochs, batch_size=4, lr=1e-6)
    last, first = 10, 11  # the last step of the first run, the first of the second
    assert list(moments[last]) == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert list(moments[first]) == ["b.weight", "b.bias", "a.weight", "a.bias"]
    assert moments[first] == pytest.approx(moments[last], rel=0.5)
    assert decays[first] == decays[last]


def test_an_optimizer_saved_without_names_is_restored_in_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_names(self: train_state.OptimizerState) -> dict[str, Any]:
        return {"kind": "AdamW", **self.optimizer.state_dict()}

    steps: list[float] = []

    def note(end: StepEnd) -> None:
        steps.extend(float(entry["step"]) for entry in end.state.stepper.optimizer.state.values())

    with monkeypatch.context() as patch:
        patch.setattr(train_state.OptimizerState, "state_dict", without_names)
        run(tmp_path / "out", layers("ab"), epochs=1)
    _, told = run(tmp_path / "out", layers("ab"), note, epochs=2)
    assert steps == [3.0] * 4 + [4.0] * 4
    assert "starts from nothing" not in told


def test_an_optimizer_of_other_parameters_is_told_by_their_names(tmp_path: Path) -> None:
    run(tmp_path / "out", layers("abc", optimizer=a_group_each("ab")), epochs=1)
    _, told = run(tmp_path / "out", layers("abc", optimizer=a_group_each("ac")), epochs=2)
    assert (
        "the optimizer starts from nothing: the checkpoint's is for other parameters:"
        " 2 missing in the file: c.bias, c.weight; 2 unexpected in the file: b.bias, b.weight"
    ) in told


def test_a_resume_between_two_stages_makes_the_new_optimizer(tmp_path: Path) -> None:
    """Seen to fail: the moments of the first stage were put into the optimizer of the second."""
    stages = (Stage("one", 1), Stage("two", 1, lr=0.05))
    whole: dict[int, str] = {}
    cut: dict[int, str] = {}

    def job() -> Job:
        return victim.make_job(stages=stages, eval_data=None)

    warm_up = {"warmup_epochs": 2.0}  # as long as both stages: their epochs count, not the settings'
    run(tmp_path / "whole", job(), lambda end: whole.update({end.step: victim.fingerprint(end)}), **warm_up)

    class Enough(Exception):
        pass

    def stop(end: StepEnd) -> None:
        if end.step == 3:
            raise Enough

    with pytest.raises(Enough):
        run(tmp_path / "cut", job(), stop, **warm_up)
    run(tmp_path / "cut", job(), lambda end: cut.update({end.step: victim.fingerprint(end)}), **warm_up)
    assert cut == {step: whole[step] for step in (3, 4)}


def test_a_loss_scale_of_one_is_a_scale() -> None:
    """Seen to fail: 1.0 was taken for the scale of a run without fp16, and 65536 put in its place."""
    before, after = (LossScale(torch.device("cpu"), active=True) for _ in range(2))
    before.scale.fill_(1.0)
    after.load_state_dict(before.state_dict())
    assert after.scale == 1.0
    after.load_state_dict(LossScale(torch.device("cpu"), active=False).state_dict() | {"scale": torch.tensor(8.0)})
    assert after.scale == 1.0


# --------------------------------------------------------------------------- mistakes


class Samples(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.zeros(6), True)])


class Learning(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.margin = torch.nn.Parameter(torch.ones(()))

    def forward(self, model: Any, batch: Any) -> torch.Tensor:
        return self.margin


def outputs(model: Any, batch: Any) -> torch.Tensor:
    return torch.as_tensor(model(batch[0]))


def loss(model: Any, batch: Any) -> torch.Tensor:
    return victim.loss(model, batch)[0]


@pytest.mark.parametrize(
    ("changes", "settings", "words"),
    [
        ({"loss": outputs}, {}, r"the loss should be one number, not a tensor of shape \(22,\)"),
        ({"loss": lambda m, b: {"loss": loss(m, b)}}, {}, "one number, not a dict"),
        ({"loss": lambda m, b: loss(m, b).item()}, {}, "no gradient flows from the loss"),
        ({"loss": lambda m, b: (loss(m, b), outputs(m, b))}, {}, "the loss returned"),
        ({"loss": lambda m, b: (loss(m, b), {"each": outputs(m, b)})}, {}, "the metric each should be one number"),
        ({"loss": Learning()}, {}, "parameters that the optimizer would not see: margin"),
        ({"loss": 3}, {}, "should be a function of model and batch"),
        ({"model": None}, {}, "should be a torch.nn.Module"),
        ({"model": torch.nn.ReLU()}, {}, "no parameter that is trained"),
        ({"stages": (Stage("none", 1, frozen=("*",)),)}, {}, "no parameter that is trained"),
        ({"optimizer": lambda m, s, d: None}, {}, "not an optimizer"),
        ({"data": Samples()}, {}, "does not say whether it gives samples or batches"),
        ({"data": (x for x in [(torch.zeros(2, 6), torch.ones(2))])}, {"max_steps": 9, "epochs": 9}, "in epoch 2"),
        ({"eval_data": []}, {}, "eval_data is empty"),
        ({"eval_metrics": lambda rows: 0.5}, {}, "eval_metrics returned a float"),
        ({"eval_metrics": lambda rows: {"auc": "high"}}, {}, "the metric auc should be one number, not a str"),
        ({}, {"keep_last": 0, "lr": -1.0}, "2 problems in settings"),
    ],
)
def test_mistakes_are_told(changes: dict[str, Any], settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        run(tmp_path / "out", victim.make_job(**changes), **settings)
    if (tmp_path / "out").exists():  # a notebook lives on
        with OwnedFolder(tmp_path / "out").locked("the lock was not released"):
            pass


class Odd(victim.Net):
    def __init__(self, buffer: torch.Tensor | None) -> None:
        super().__init__()
        self.register_buffer("odd", buffer)

    def get_extra_state(self) -> Any:
        return {"a": 1} if self.odd is None else torch.zeros(1)

    def set_extra_state(self, state: Any) -> None:
        pass


@pytest.mark.parametrize("buffer", [None, torch.zeros(2, dtype=torch.complex64), torch.eye(2).to_sparse()])
def test_what_no_checkpoint_can_hold_is_told_before_step_0(buffer: torch.Tensor | None, tmp_path: Path) -> None:
    """Seen to fail: without `_checked` an epoch was trained first."""
    steps: list[int] = []
    with pytest.raises(UsageError, match="cannot save"):
        run(tmp_path / "out", victim.make_job(model=Odd(buffer)), lambda end: steps.append(end.step))
    assert not steps


def test_a_monitor_that_is_not_measured_is_told(tmp_path: Path) -> None:
    """Seen to fail: nothing was said, and no best checkpoint was kept."""
    _, told = run(tmp_path / "out", victim.make_job(), monitor="eval_acuracy")
    assert "monitor: eval_acuracy was not measured, only loss, accuracy; did you mean accuracy?" in told


def test_numbers_of_any_kind_are_metrics(tmp_path: Path) -> None:
    """Seen to fail: a metric of numpy's reached the checkpoint, which cannot hold it."""
    kinds = {"tensor": torch.tensor([0.5]), "numpy": numpy.float32(0.25), "int": 1}

    def metered(model: Any, batch: Any) -> Any:
        return loss(model, batch), kinds

    job = victim.make_job(loss=metered, eval_metrics=lambda rows: {"auc": torch.tensor(0.75), "f": numpy.float64(2)})
    outcome, _ = run(tmp_path / "out", job, monitor="auc", lr=numpy.float64(0.1))
    assert {name: outcome.metrics[f"train_{name}"] for name in kinds} == {"tensor": 0.5, "numpy": 0.25, "int": 1.0}
    assert (newest(tmp_path / "out").metric, outcome.metrics["eval_f"]) == (0.75, 2.0)


def test_a_metric_that_is_no_number_once_does_not_hide_the_best() -> None:
    history = train_state.MetricHistory("max")
    history.values = list(enumerate((float("nan"), 0.5, float("nan"), 0.25)))
    assert history.best == 0.5


# --------------------------------------------------------------------------- nothing is lost


def test_an_evaluation_that_fails_loses_no_step(tmp_path: Path) -> None:
    """Seen to fail: without the snapshot before the evaluation the epoch was trained for nothing."""

    def broken(rows: Any) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "out", victim.make_job(eval_metrics=broken), epochs=2)
    assert newest(tmp_path / "out").step == 2
    steps: list[int] = []
    outcome, _ = run(tmp_path / "out", None, lambda end: steps.append(end.step), epochs=2)
    assert steps == [3, 4]
    whole, _ = run(tmp_path / "whole", victim.make_job(), epochs=2)
    assert outcome.metrics["train_loss"] == whole.metrics["train_loss"]


def test_an_evaluation_stops_when_it_is_told_to_and_is_done_again(tmp_path: Path) -> None:
    """Seen to fail: without the question in `evaluate` the run went on to the end of the evaluation."""
    seen: list[int] = []

    def slow(model: Any, batch: Any) -> torch.Tensor:
        seen.append(len(seen))
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss(model, batch)

    job = victim.make_job(eval_loss=slow)
    with pytest.raises(StoppedEarly, match="SIGTERM"):
        run(tmp_path / "out", job, eval_batch_size=2)
    assert len(seen) == 2
    assert newest(tmp_path / "out").step == 2
    outcome, _ = run(tmp_path / "out", victim.make_job(), eval_batch_size=2)
    assert outcome.metrics["eval_loss"] > 0


def test_weights_that_are_not_finite_are_not_kept(tmp_path: Path) -> None:
    """Seen to fail: the optimizer's own overflow was saved over the last good checkpoint."""

    def overflow(end: StepEnd) -> None:
        if end.step == 3:
            with torch.no_grad():
                end.state.model.last.bias.fill_(float("inf"))

    with pytest.raises(Diverged, match=r"no longer finite at step 4: last\.bias"):
        run(tmp_path / "out", None, overflow, epochs=2)
    assert newest(tmp_path / "out").step == 2


def test_a_log_that_cannot_be_written_does_not_end_a_training(tmp_path: Path) -> None:
    def put_theirs(end: StepEnd) -> None:
        (tmp_path / "out" / "metrics.csv").write_text("mine")

    _, told = run(tmp_path / "out", on_step=put_theirs)
    assert "warning: " in told
    assert (tmp_path / "out" / "metrics.csv").read_text() == "mine"


def test_no_traceback_where_the_folder_is_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Seen to fail: the log could not be written there, and the traceback went to the screen."""
    (tmp_path / "out").write_text("")

    def refuse() -> None:
        raise MachineError("cannot write", "Make room.")

    assert exit_code_of(refuse, tmp_path / "out") == 7
    assert capfd.readouterr().err == "fulltilt: cannot write\n  Make room.\n"
    assert exit_code_of(lambda: 1 // 0, tmp_path / "out") == 1
    shown = capfd.readouterr().err
    assert "Traceback" not in shown
    log = Path(shown.split("all of it is in ")[1].split(")")[0])
    assert "ZeroDivisionError" in log.read_text()


def test_a_finished_run_is_not_evaluated_again(tmp_path: Path) -> None:
    """Seen to fail: a save at the last step of the epoch hid that the epoch had ended."""
    run(tmp_path / "out", victim.make_job(), save_every=2)
    outcome, _ = run(tmp_path / "out", victim.make_job(), save_every=2)
    assert (outcome.epochs, outcome.metrics) == (1, {})


def test_a_screen_that_nobody_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: ``| head`` ended with code 120 at the flush of Python's own end, ``>&-`` with an AttributeError."""
    reading, writing = os.pipe()
    os.close(reading)
    pipe = os.fdopen(writing, "w")
    for stream in (pipe, None):
        monkeypatch.setattr(sys, "stdout", stream)
        screen = TrainingScreen(tmp_path / "out", sampled=False)
        screen.say("to nobody")
        screen.say("to nobody")
    pipe.close()
