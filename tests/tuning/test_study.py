"""Whole studies of a real script in real processes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from fulltilt.cli import study_ending
from fulltilt.cli.studying import conduct
from fulltilt.errors import FulltiltError, UsageError
from fulltilt.recorder.launch import job_command
from fulltilt.records import RunRecord, Settings, Trial
from fulltilt.report.screen import open_console
from fulltilt.store import RUN_FILE, LineWriter, create_folder, read_lines, write_json
from fulltilt.testing import FakeClock
from fulltilt.tuning import early
from fulltilt.tuning.assignment import Assignment
from fulltilt.tuning.course import time_limit_s
from fulltilt.tuning.interval import Patience
from fulltilt.tuning.outcome import Attempt
from fulltilt.tuning.processes import ForkedStarts
from fulltilt.tuning.source_patch import fingerprint
from fulltilt.tuning.space import Space
from fulltilt.tuning.study import TRIALS_FILE, Study
from fulltilt.tuning.study_record import STUDY_FILE, StudyRecord
from fulltilt.tuning.template import Template, _modules_that_start_the_gpu
from fulltilt.tuning.trial_run import Ended, Limits
from tests.diagnosis.examples import loader

QUICK = Patience(wanted_error=0.2, least_blocks=3, least_s=0.15, most_s=1.0, block_s=0.05)

# A loader that waits, so that workers pay even on a busy machine, and a trial that asks for its number.
SCRIPT = """
import os, sys, time
open("train.log", "w").write("a trial was here")
import torch
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.full((16,), float(index % 7)), index % 4

def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.makedirs("elsewhere", exist_ok=True)
    os.chdir("elsewhere")
    loader = DataLoader(Slow(), batch_size=8, shuffle=True)
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0004)
    for step, (inputs, labels) in enumerate(loader):
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 2:
            torch.save(model.state_dict(), "../checkpoint.pt")
            trial = os.path.basename(os.environ["FULLTILT_RUN_DIR"])
            FAILS
    open("../the_end.txt", "w").close()

if __name__ == "__main__":
    main()
"""
FAILS = """
            if trial == "trial-003":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
            if trial == "trial-004":
                raise ValueError("bad record 17")
            if trial == "trial-005":
                time.sleep(600)
"""


def checkpoint_of(folder: Path, fails: str = "") -> str:
    (folder / "train.py").write_text(SCRIPT.replace("FAILS", fails.strip() or "pass"))
    (folder / "checkpoint.pt").write_bytes(os.urandom(4096))
    (folder / "train.log").write_text("of the user's last training")
    return hashlib.sha256((folder / "checkpoint.pt").read_bytes()).hexdigest()


def _files_of_an_unread_end(end: Callable[[], None], out: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many files the end of a study leaves where whoever read what it prints has gone, as head does."""
    files = [out / "settings.json", out / "change.diff"]
    for file in files:
        file.unlink()
    reader, writer = os.pipe()
    os.close(reader)
    with monkeypatch.context() as patch, os.fdopen(writer, "w") as unread:
        patch.setattr(sys, "stdout", unread)
        end()
    return sum(file.exists() for file in files)


def test_trials_that_fail_are_results_and_the_users_files_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    before = checkpoint_of(tmp_path, FAILS)
    out = Path("study")
    out.mkdir()
    space = Space(usable_cpus=4)
    said: list[str] = []
    study = Study(["train.py"], job_command(["train.py"]), out, space, 8.0, said.append, QUICK)
    try:
        study.run(60.0, lambda *_: None, lambda _: None)
    finally:
        study.close()
    assert said == []  # every trial was forked
    trials = list(read_lines(out / TRIALS_FILE, Trial))
    assert [trial.state for trial in trials[:5]] == ["ok", "ok", "oom", "crashed", "timed_out"]
    assert trials[3].note == "ValueError: bad record 17"
    assert {trial.state for trial in trials[5:]} == {"ok"}
    assert trials[1].samples_per_s > trials[0].samples_per_s  # type: ignore[operator]
    assert hashlib.sha256((tmp_path / "checkpoint.pt").read_bytes()).hexdigest() == before
    assert (tmp_path / "train.log").read_text() == "of the user's last training"  # though torch comes later
    assert not (tmp_path / "the_end.txt").exists()
    assert {change for trial in trials for change in trial.changed_files} == set()
    assert trials[0].losses[:10] == pytest.approx(trials[1].losses[:10])  # the same random numbers in each

    from fulltilt.cli.study_ending import end_study

    end_study(study.record, trials, out, apply=False)
    shown = capsys.readouterr().out
    for state in ("out of memory", "crashed", "timed out", "Current", "Solution 1", "Verified"):
        assert state in shown
    settings = json.loads((out / "settings.json").read_text())
    assert settings["num_workers"] >= 1
    assert "batch_size" not in settings
    diff = (out / "change.diff").read_text()
    assert "+    loader = DataLoader(" in diff
    assert _files_of_an_unread_end(lambda: end_study(study.record, trials, out, apply=False), out, monkeypatch) == 2
    if shutil.which("patch"):  # what is told writes this diff: a second study might find another
        told = next(line for line in shown.splitlines() if "write it with: " in line).partition("write it with: ")[2]
        subprocess.run(shlex.split(told), check=True, capture_output=True)
        now = (tmp_path / "train.py").read_text().splitlines()
        assert all(line[1:] in now for line in diff.splitlines() if line.startswith("+ "))


def tune(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "fulltilt", "tune", "--out", "study", *arguments, "train.py"]


def tuned(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(tune(*arguments), cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_learned_and_the_study_goes_on(tmp_path: Path) -> None:
    checkpoint_of(tmp_path)
    process = subprocess.Popen(
        tune("--allow", "batch"), cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "trial 2" in line:
            break
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "Go on with: fulltilt tune --out study --allow batch train.py" in errors
    assert "Current" in out
    learned = (tmp_path / "study" / TRIALS_FILE).read_text().count("\n")
    done = tuned(tmp_path, "--budget", "90s", "--allow", "batch")
    assert done.returncode == 0
    assert f"has {learned} trial" in done.stderr
    assert "trial 1:" not in done.stderr


@pytest.mark.slow
def test_a_verified_change_is_applied_and_a_study_of_another_command_is_refused(tmp_path: Path) -> None:
    checkpoint_of(tmp_path)
    done = tuned(tmp_path, "--budget", "150s", "--apply")
    assert done.returncode == 0, done.stderr
    assert "num_workers=" in (tmp_path / "train.py").read_text()
    assert "batch_size=8" in (tmp_path / "train.py").read_text()
    again = tuned(tmp_path, "--budget", "150s", "--apply")  # verified already: no trial is made
    assert again.returncode == 0, again.stderr
    assert "nothing is left to write" in again.stdout
    other = tuned(tmp_path, "--allow", "batch")
    assert other.returncode == 2
    assert "holds a study of another command" in other.stderr


@pytest.mark.slow
def test_a_script_that_breaks_as_it_is_says_so_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\nraise KeyError('lr')\n")
    began = time.monotonic()
    done = tuned(tmp_path)
    assert done.returncode == 2
    assert "KeyError: 'lr'" in done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - began < 120


@pytest.mark.parametrize("changed", ["train.py", "data.py"])
def test_a_study_does_not_go_on_with_a_script_that_has_changed(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the script itself nor the file in which it makes its loader."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "data.py"):
        (tmp_path / name).write_text("as it was")
    out = create_folder(tmp_path / "study")
    source, script = fingerprint(tmp_path / "data.py"), fingerprint(tmp_path / "train.py")
    record = StudyRecord(("train.py",), str(tmp_path), (), "today", loader(where="data.py:1"), source)
    record = replace(record, script_sha256=script)
    write_json(out / STUDY_FILE, record)
    starved = Trial(Settings(), "ok", 9.0, purpose="start", in_force=Settings(num_workers=0), data_wait_share=0.9)
    with contextlib.closing(LineWriter(out / TRIALS_FILE)) as writer:
        writer.write([starved])
    (tmp_path / changed).write_text("as it is")
    study = Study(["train.py"], ["python", "train.py"], out, Space(2), None, print)
    assert len(study.trials) == 1
    with pytest.raises(UsageError, match=f"{changed} has changed since the first of the 1 trials"):
        study.run(1e6, lambda *_: None, lambda _: None)
    study.close()


def test_a_study_in_which_nothing_worked_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user has installed what was missing: the old failure is no news."""
    monkeypatch.chdir(tmp_path)
    told: list[str] = []
    for _ in range(2):
        study = Study(
            ["train.py"], ["python", "train.py"], create_folder(tmp_path / "study"), Space(2), None, told.append
        )
        assert not study.trials
        study._writer.write([Trial(Settings(), "crashed", purpose="start", note="No module named 'timm'")])
        study.close()
    assert [line.partition(";")[2] for line in told] == [" the study begins anew"]


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """A template is in place in this very process; how often it has served instead of forking."""
    monkeypatch.setattr(os, "fork", lambda: 7)
    monkeypatch.setattr("fulltilt.tuning.template.importlib.import_module", lambda _: None)
    threads, init = torch.get_num_threads(), DataLoader.__init__
    template = Template(torch, *os.pipe(), tmp_path)
    times: list[bool] = []
    monkeypatch.setattr(template, "_serve", lambda: times.append(True))
    template.install()
    yield times
    guards = early.taken_over()
    assert guards is not None
    guards.restore()
    torch.set_num_threads(threads)
    DataLoader.__init__ = init  # type: ignore[method-assign]


def test_a_script_that_forks_is_forked_from_before_it_does(served: list[bool]) -> None:
    assert [os.fork(), os.fork()] == [7, 7]
    assert served == [True]


def test_a_library_that_wraps_loaders_for_a_while_may_put_back_what_it_found(served: list[bool]) -> None:
    """As Lightning does around each of its hooks: the stop before the fork came back, and called itself for ever."""
    kept = []
    for _ in range(2):
        found = DataLoader.__init__

        def wrapper(loader: Any, *args: Any, init: Any = found) -> None:
            kept.append(args)
            init(loader, *args)

        DataLoader.__init__ = wrapper  # type: ignore[method-assign]
        try:
            assert len(DataLoader([1, 2, 3], 2)) == 2  # type: ignore[arg-type]
        finally:
            DataLoader.__init__ = found  # type: ignore[method-assign]
    assert len(kept) == 2
    assert served == [True]


def test_every_way_to_start_the_gpu_is_guarded() -> None:
    """torch.cuda.memory and torch.cuda.random hold the function by a name of their own."""
    assert {torch.cuda, torch.cuda.memory, torch.cuda.random} <= set(_modules_that_start_the_gpu(torch))


def test_a_study_stopped_before_its_first_trial_claims_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Study, "run", stopped)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        folder = create_folder(tmp_path / "study")
        code = conduct(["train.py"], ["python", "train.py"], folder, frozenset(), 60.0, None, apply=False)
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert code == 3
    said = capsys.readouterr().err
    assert "stopped; no trial has ended yet. Go on with: fulltilt tune" in said
    assert "learned" not in said


@pytest.mark.parametrize("comes_to_its_loader", [True, False])
@pytest.mark.parametrize(("budget_s", "trial_limit_s"), [(15.0, None), (200.0, None), (15.0, 10.0)])
def test_a_script_that_hangs_takes_no_longer_than_there_is_for_its_first_trial(
    comes_to_its_loader: bool,
    budget_s: float,
    trial_limit_s: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However often it is started: forked, then anew."""
    monkeypatch.chdir(tmp_path)
    clock, tried = FakeClock(), list[float]()
    monkeypatch.setattr("fulltilt.tuning.study.time", SimpleNamespace(monotonic=clock))

    def opened(_command: object, _folder: object, _scratch: object, limit_s: float) -> ForkedStarts | str:
        clock.advance(5.0 if comes_to_its_loader else limit_s)
        starts = ForkedStarts.__new__(ForkedStarts)
        starts.opened_in_s = 5.0
        return starts if comes_to_its_loader else "the script did not come to its first loader"

    def hung(_starts: object, assignment: Assignment, record: RunRecord, limits: Limits, *_: object) -> Ended:
        clock.advance(limits.time_s)
        tried.append(limits.time_s)
        write_json(create_folder(Path(assignment.folder)) / RUN_FILE, replace(record, state="killed"))
        return Ended(-9, "time", limits.time_s, "")

    monkeypatch.setattr(ForkedStarts, "open", opened)
    monkeypatch.setattr(ForkedStarts, "close", lambda _: None)
    monkeypatch.setattr("fulltilt.tuning.study.run_trial", hung)
    told: list[str] = []
    study = Study(["train.py"], [], create_folder(tmp_path / "study"), Space(2), trial_limit_s, told.append)
    limits = Limits(time_limit_s([], budget_s, trial_limit_s))
    trial = study.measure(Attempt(Settings(), "start", ""), limits)
    study.close()
    assert trial.state == "timed_out"
    assert len(tried) == (2 if comes_to_its_loader else 1)
    assert min(tried) > 5.0
    assert clock() <= max(budget_s, 120.0)
    assert clock() <= 80.0 or trial_limit_s is None


def test_what_was_changed_past_python_is_told_with_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("the user's")

    def shell(*_: object) -> Ended:
        os.system("echo x > notes.txt")
        return Ended(1, None, 1.0, "")

    monkeypatch.setattr("fulltilt.tuning.study.run_trial", shell)
    monkeypatch.setattr(Study, "_ready", lambda *_: None)
    told: list[str] = []
    study = Study(["train.py"], [], create_folder(Path("study")), Space(2), None, told.append)
    with contextlib.suppress(FulltiltError):  # it has left no record of itself
        study.measure(Attempt(Settings(), "search", ""), Limits(1.0))
    study.close()
    assert told == ["notes.txt is not as it was before the trials; as it was: study/before/notes.txt"]
    assert Path("study/before/notes.txt").read_text() == "the user's"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "Without a change to the script: fulltilt run --settings "),
        (
            {"batch_size": 16, "precision": "bf16"},
            "Without a change to the script, the loader's part alone, not batch 16, bf16: fulltilt run --settings ",
        ),
    ],
)
def test_what_a_settings_file_does_not_hold_is_not_promised_of_it(
    more: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = StudyRecord(("train.py",), str(tmp_path), ("batch",), "today")
    settings = Settings(num_workers=4, **more)
    study_ending._hand_over(open_console(), record, settings, settings, tmp_path, apply=False)
    assert said in capsys.readouterr().out
    assert json.loads((tmp_path / "settings.json").read_text()) == {"num_workers": 4}


@pytest.mark.parametrize("theirs", ["settings.json", "scratch/notes.txt"])
def test_a_folder_with_other_things_is_no_place_for_a_study(
    theirs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--out .`: at its end a study deletes its scratch folder and an earlier settings file."""
    monkeypatch.chdir(tmp_path)
    Path(theirs).parent.mkdir(exist_ok=True)
    Path(theirs).write_text("the user's")
    with pytest.raises(UsageError, match=r"^\. holds other things than a study"):
        Study(["train.py"], [], Path(), Space(2), None, print)
    assert Path(theirs).read_text() == "the user's"
    assert not Path("study.json").exists()
