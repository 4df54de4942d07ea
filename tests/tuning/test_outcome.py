"""What the end of a trial means: its state and its figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fulltilt.probes.gpu import Gpus
from fulltilt.records import Run, Sample, Settings, Trial
from fulltilt.testing import FakeClock, throttled_gpu
from fulltilt.tuning.search_space import Attempt
from fulltilt.tuning.trial.outcome import last_exception, trial_record
from fulltilt.tuning.trial.run_trial import Ended
from fulltilt.tuning.trial.throughput import Answer, StepBlock
from tests.diagnosis import examples

ATTEMPT = Attempt(Settings(num_workers=8), "search")
LOSSES = tuple(2.0 - 0.01 * step for step in range(40))
ANSWER = Answer(tuple([StepBlock(64, 0.25, 0.1)] * 8), steps=80, losses=LOSSES, complete=True)
DONE = Ended(0, None, 9.0, "epoch 1\n")
START = Trial(Settings(), "ok", 100.0, purpose="start", losses=LOSSES)

CUDA = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 15.77 GiB
"""
SHARED = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's \
workers are out of shared memory. Please try to raise your shared memory limit. insufficient shared memory (shm)."
DRIVER = "torch.AcceleratorError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported\n"
NUMPY = "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8.00 GiB for an array with shape (2, 4)\n"
FULL = "RuntimeError: unable to write to file </torch_7>: No space left on device (28)\n"
HINT = "tip: on CUDA out of memory errors lower --batch\nTraceback (most recent call last):\nValueError: no such file\n"


@pytest.mark.parametrize(
    ("ended", "answer", "state", "note"),
    [
        (DONE, ANSWER, "ok", None),
        (Ended(1, None, 3.0, CUDA), None, "oom", "torch.OutOfMemoryError: CUDA out of memory"),
        (Ended(1, None, 3.0, SHARED), None, "oom", "RuntimeError: DataLoader worker"),
        (Ended(1, None, 3.0, DRIVER), None, "oom", "torch.AcceleratorError: CUDA error: out of memory"),
        (Ended(1, None, 3.0, NUMPY), None, "oom", "numpy._core._exceptions._ArrayMemoryError: Unable to allocate"),
        (Ended(1, None, 3.0, FULL), None, "oom", "RuntimeError: unable to write to file </torch_7>"),
        (Ended(-6, None, 3.0, "terminate called: CUDA out of memory\n"), None, "oom", None),
        (Ended(1, None, 3.0, HINT), None, "crashed", "ValueError: no such file"),
        (Ended(-9, None, 3.0, ""), None, "oom", "killed by the system"),
        (Ended(-9, "memory", 3.0, ""), None, "oom", "used more memory"),
        (Ended(1, None, 3.0, "x\nValueError: no such file\n"), None, "crashed", "ValueError: no such file"),
        (Ended(-11, None, 3.0, ""), None, "crashed", "ended by SIGSEGV"),
        (Ended(7, None, 3.0, "usage\nno data\n"), None, "crashed", "ended with exit code 7: no data"),
        (Ended(255, None, 3.0, ""), None, "crashed", "ended with exit code 255"),
        (Ended(-127, None, 3.0, ""), None, "crashed", "ended with exit code -127"),  # no signal has that number
        (Ended(2, None, 3.0, "no option\n  Try: --help\n\n"), None, "crashed", "ended with exit code 2: no option"),
        (Ended(2, None, 3.0, "  indented\n"), None, "crashed", "ended with exit code 2: indented"),
        (Ended(-9, "time", 60.0, ""), None, "timed_out", "stopped after 60 s"),
        (Ended(0, None, 3.0, ""), None, "not_measured", "the script ended without a step of an optimizer"),
        (
            DONE,
            Answer((), 7, (), complete=False),
            "not_measured",
            "the script ended after 7 steps: too few",
        ),
        (DONE, replace(ANSWER, losses=LOSSES[:7], not_finite_at=7), "diverged", "the loss of step 8 is not a finite"),
        (DONE, replace(ANSWER, losses=(9.0,) * 40), "diverged", "mean loss of steps 21 to 40: 9"),
        (DONE, replace(ANSWER, out_of_memory=2), "oom", None),
        # Another rank was ended after the answer: the answer counts.
        (Ended(-9, None, 9.0, ""), ANSWER, "ok", None),
    ],
)
def test_the_state_of_a_trial(ended: Ended, answer: Answer | None, state: str, note: str | None) -> None:
    trial = trial_record(ATTEMPT, ended, answer or Answer(), examples.run_of(), START)
    assert trial.state == state
    assert (trial.note or "").startswith(note or "")
    assert (trial.note is None) == (note is None)


def test_a_loss_that_the_start_did_not_come_to_speaks_against_no_loader() -> None:
    """A faster trial makes more steps, and meets the step at which the script itself diverges."""
    answer = replace(ANSWER, losses=(*LOSSES, 1.0), not_finite_at=41)
    trial = trial_record(ATTEMPT, DONE, answer, examples.run_of(), START)
    assert (trial.state, trial.note) == ("ok", "the loss of step 42 is not a finite number")
    for attempt in (Attempt(Settings(precision="bf16"), "search"), Attempt(Settings(batch_size=8), "search")):
        assert trial_record(attempt, DONE, answer, examples.run_of(), START).state == "diverged"
    assert trial_record(Attempt(Settings(), "start"), DONE, answer, examples.run_of(), None).state == "diverged"


def test_a_script_without_a_loader_has_nothing_to_tune() -> None:
    answer = Answer((), 900, (), complete=True)
    trial = trial_record(ATTEMPT, DONE, answer, examples.run_of(examples.rank(loaders=())), None)
    assert trial.state == "not_measured"
    assert trial.note == "the script trained 900 steps without a batch from a DataLoader: there is no loader to tune"


def test_workers_that_a_library_did_not_take_were_not_measured() -> None:
    for library, state in (("fastai", "not_measured"), (None, "ok")):
        loader = examples.loader(num_workers=0, made_by=library)
        trial = trial_record(
            Attempt(Settings(num_workers=4), "search"),
            DONE,
            ANSWER,
            examples.run_of(examples.rank(loaders=(loader,))),
            START,
        )
        assert trial.state == state
        assert ("num_workers=4 in DataBlock.dataloaders(" in (trial.note or "")) == (library is not None)


def test_a_script_stopped_before_it_trained_did_not_crash() -> None:
    trial = trial_record(ATTEMPT, Ended(-9, "time", 60.0, ""), Answer(), replace(examples.run_of(), spans=()), None)
    assert trial.state == "timed_out"
    assert trial.note == (
        "stopped after 60 s: the script had not reached a training loop (no step of an optimizer was seen)"
    )


def test_the_figures_of_a_trial() -> None:
    trial = trial_record(ATTEMPT, DONE, ANSWER, examples.run_of(examples.rank(world_size=2)), START)
    assert trial.samples_per_s == pytest.approx(2 * 256.0)
    assert trial.data_wait_share == pytest.approx(0.4)
    assert (trial.wall_s, trial.purpose) == (9.0, "search")
    assert (trial.in_force.num_workers, trial.in_force.accumulation) == (examples.loader().num_workers, 1)


def test_a_throttled_gpu_makes_a_trial_invalid() -> None:
    clock = FakeClock()
    gpus = Gpus.open(throttled_gpu(clock, after_s=0.0), clock=clock)
    samples = []
    for second in range(100):
        clock.advance(1.0)
        samples.append(Sample(float(second), examples.host(), gpus.read()))
    run = examples.run_of(examples.gpu_rank(gpu_uuid=samples[0].gpus[0].uuid))
    slowed: Run = replace(run, samples=tuple(samples))
    trial = trial_record(ATTEMPT, DONE, ANSWER, slowed, START)
    assert trial.state == "throttled"
    assert "slowed down" in (trial.note or "")


def test_the_last_exception_is_named_on_one_line() -> None:
    tail = "KeyError: 'a'\n\nDuring handling …\n\nmylib.errors.BadBatchError: too odd\n[rank0] bye\n"
    assert last_exception(tail) == "mylib.errors.BadBatchError: too odd"
    assert last_exception("all is well") is None


def test_what_a_launcher_says_of_its_ranks_is_not_why_they_failed() -> None:
    launcher = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    assert last_exception(f"[rank1]: x\nValueError: no data\n{launcher}") == "ValueError: no data"
    usage = "train.py: error: unrecognized arguments: --budget 3s"
    assert last_exception(f"usage: train.py [-h]\n{usage}\n{launcher}") == usage


def test_settings_are_those_of_the_loader_that_is_studied() -> None:
    """Once it was fast enough, those of the loader beside it were told: other workers, and another batch size."""
    studied = examples.loader(where="train.py:3", dataset_len=4000, num_workers=8, batch_size=16, wait_s=1.0)
    beside = examples.loader(
        loader_id=1, where="train.py:4", dataset_len=2000, num_workers=0, batch_size=4, wait_s=50.0
    )
    run = examples.run_of(examples.rank(loaders=(studied, beside)))
    trial = trial_record(ATTEMPT, DONE, ANSWER, run, START, studied)
    assert (trial.in_force.num_workers, trial.in_force.batch_size) == (8, 16)
    unknown = trial_record(ATTEMPT, DONE, ANSWER, run, START, None)
    assert unknown.in_force.num_workers == 0, "before it is known which one is studied: the one that is waited for"
