"""Whole studies of a real script in real processes."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from fulltilt.cli.main import main
from fulltilt.cli.tune import _write_winner, end_study, run_study
from fulltilt.errors import ForeignFiles, UsageError
from fulltilt.recorder.job_command import job_command
from fulltilt.records import Settings, Trial
from fulltilt.report.console import open_console
from fulltilt.store import LineWriter, OwnedFolder, owned_folder, read_lines, write_json
from fulltilt.tuning import study as study_module
from fulltilt.tuning.search_space import Attempt, Space
from fulltilt.tuning.source_edit import fingerprint
from fulltilt.tuning.study import KIND, STUDY_FILE, TRIALS_FILE, Study, StudyRecord, learned
from fulltilt.tuning.trial.isolation import Isolation, choose
from fulltilt.tuning.trial.throughput import Patience
from fulltilt.tuning.verification import winner
from tests.diagnosis.examples import loader, rank, run_of

IN_PLACE = Isolation("none")
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
                os.kill(os.getpid(), 9)
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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_trials_that_fail_are_results_and_the_users_files_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    before = checkpoint_of(tmp_path, FAILS)
    out = Path("study")
    isolation, _ = choose()
    assert isolation is not None
    study = Study(["train.py"], job_command(["train.py"]), out, Space(usable_cpus=4), isolation, 60.0, patience=QUICK)
    try:
        study.run(600.0, lambda *_: None, lambda _: None)
    finally:
        study.close()
    trials = list(read_lines(out / TRIALS_FILE, Trial))
    assert [trial.state for trial in trials[:5]] == ["ok", "ok", "oom", "crashed", "oom"]
    assert trials[3].note == "ValueError: bad record 17"
    assert {trial.state for trial in trials[5:]} == {"ok"}
    assert trials[1].samples_per_s > trials[0].samples_per_s  # type: ignore[operator]
    assert hashlib.sha256((tmp_path / "checkpoint.pt").read_bytes()).hexdigest() == before
    assert (tmp_path / "train.log").read_text() == "of the user's last training"  # though torch comes later
    assert not (tmp_path / "the_end.txt").exists()
    assert sorted(os.listdir(tmp_path)) == ["checkpoint.pt", "study", "train.log", "train.py"]
    assert trials[0].losses[:10] == pytest.approx(trials[1].losses[:10])  # the same random numbers in each

    end_study(study.record, trials, out, apply=False)
    shown = capsys.readouterr().out
    for word in ("Current", "Solution 1", "Verified"):
        assert word in shown
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
@pytest.mark.timeout(900)
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
    assert "To resume:\n  fulltilt tune --out study --allow batch train.py" in errors
    assert "Current" in out
    learned = (tmp_path / "study" / TRIALS_FILE).read_text().count("\n")
    done = tuned(tmp_path, "--budget", "600s", "--allow", "batch")
    assert done.returncode == 0
    assert f"has {learned} trial" in done.stderr
    assert "trial 1:" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_verified_change_is_applied_and_a_study_of_another_command_is_refused(tmp_path: Path) -> None:
    checkpoint_of(tmp_path)
    done = tuned(tmp_path, "--budget", "1h", "--apply")
    assert done.returncode == 0, done.stderr
    assert "num_workers=" in (tmp_path / "train.py").read_text()
    assert "batch_size=8" in (tmp_path / "train.py").read_text()
    again = tuned(tmp_path, "--budget", "1h", "--apply")  # verified already: no trial is made
    assert again.returncode == 0, again.stderr
    assert "nothing is left to write" in again.stdout
    other = tuned(tmp_path, "--allow", "batch")
    assert other.returncode == 2
    assert "holds a study of another command" in other.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
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
    out = OwnedFolder.claim(tmp_path / "study", KIND).path
    source, script = fingerprint(tmp_path / "data.py"), fingerprint(tmp_path / "train.py")
    record = StudyRecord(("train.py",), str(tmp_path), (), "today", loader(where="data.py:1"), source)
    record = replace(record, script_sha256=script)
    write_json(out / STUDY_FILE, record)
    starved = Trial(Settings(), "ok", 9.0, purpose="start", in_force=Settings(num_workers=0), data_wait_share=0.9)
    with contextlib.closing(LineWriter(out / TRIALS_FILE)) as writer:
        writer.write([starved])
    (tmp_path / changed).write_text("as it is")
    study = Study(["train.py"], ["python", "train.py"], out, Space(2), IN_PLACE)
    assert len(study.trials) == 1
    with pytest.raises(UsageError, match=f"{changed} has changed since the first of the 1 trials"):
        study.run(1e6, lambda *_: None, lambda _: None)
    study.close()


def test_workers_do_not_persist_where_the_loader_is_made_in_a_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("for epoch in range(9):\n    loader = DataLoader(ds)\n    train(loader)\n")
    run = run_of(rank(loaders=(loader(where="train.py:2", num_workers=2, wait_s=60.0),)), data_wait=60.0, compute=40.0)
    record = learned(StudyRecord(("train.py",), str(tmp_path), (), "today"), run, ["train.py"])
    out = OwnedFolder.claim(tmp_path / "study", KIND).path
    write_json(out / STUDY_FILE, record)
    with contextlib.closing(Study(["train.py"], ["python", "train.py"], out, Space(4), IN_PLACE)) as study:
        assert not study.space.may_persist


def test_what_the_budget_cuts_off_is_no_result_and_its_pair_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A candidate whose verification the budget ended was called broken, and the next one verified in its stead."""
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "study"
    told = partial(Study, ["train.py"], ["python", "train.py"], out, Space(4), IN_PLACE, None, lambda _: None)
    rates: list[float | None] = [100.0, 400.0, 300.0, 100.0, None]  # start, two counts of workers, start, cut off

    def measure(_study: Study, attempt: Attempt, limit_s: float, _tick: object) -> Trial:
        rate = rates.pop(0) if rates else 400.0 if attempt.settings.num_workers else 100.0
        if rate is None:
            return Trial(attempt.settings, "timed_out", purpose=attempt.purpose, wall_s=limit_s)
        figures = (rate, 0.99 * rate, 1.01 * rate)
        forced = replace(attempt.settings, num_workers=attempt.settings.num_workers or 0)
        wait = 0.01 if rate == 400.0 else 0.8
        return Trial(
            attempt.settings, "ok", *figures, purpose=attempt.purpose, in_force=forced, data_wait_share=wait, wall_s=9.0
        )

    monkeypatch.setattr(Study, "measure", measure)
    monkeypatch.setattr(study_module, "next_attempt", lambda trials, _space: searched(trials))
    first = told()
    first.run(46.0, lambda _attempt, _wall_s: None, lambda _trial: None)
    first.close()
    assert [trial.state for trial in first.trials] == ["ok"] * 4
    again = told()
    assert len(again.trials) == 3
    again.run(600.0, lambda _attempt, _wall_s: None, lambda _trial: None)
    again.close()
    verified = [trial.settings.num_workers for trial in again.trials if trial.purpose == "verify"]
    assert verified == [None, 2, None, 2]
    won = winner(again.trials)
    assert won is not None
    assert won.candidate == Settings(num_workers=2)


def test_a_budget_too_small_is_told_after_the_first_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was told at the end only, that the time was over."""
    monkeypatch.chdir(tmp_path)

    def measure(_study: Study, attempt: Attempt, limit_s: float, _tick: object) -> Trial:
        forced = replace(attempt.settings, num_workers=attempt.settings.num_workers or 0)
        figures = (100.0, 99.0, 101.0)
        return Trial(
            attempt.settings, "ok", *figures, purpose=attempt.purpose, in_force=forced, data_wait_share=0.8, wall_s=40.0
        )

    monkeypatch.setattr(Study, "measure", measure)
    for budget_s, told in ((100.0, True), (130.0, False)):
        monkeypatch.setattr(study_module, "next_attempt", lambda trials, _space: searched(trials))
        out = tmp_path / str(budget_s)
        run_study(["train.py"], ["python", "train.py"], out, frozenset(), IN_PLACE, budget_s, None, False)
        said = capsys.readouterr().err.replace("\n  ", " ").splitlines()
        place = next(place for place, line in enumerate(said) if line.startswith("fulltilt: trial 1: start"))
        warned = "this trial took 40 s; the 1 min 40 s left of the budget" in said[place + 1]
        assert warned == told
        assert ("use --budget 4m" in said[place + 1]) == told


def searched(trials: Sequence[Trial]) -> Attempt | None:
    asked: list[tuple[Settings, Literal["start", "search"]]] = [
        (Settings(), "start"),
        (Settings(num_workers=2), "search"),
        (Settings(num_workers=3), "search"),
    ]
    return Attempt(*asked[len(trials)], "in order") if len(trials) < len(asked) else None


def test_a_study_in_which_nothing_worked_starts_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user has installed what was missing: the old failure is no news."""
    monkeypatch.chdir(tmp_path)
    told: list[str] = []
    for _ in range(2):
        study = Study(["train.py"], ["python", "train.py"], tmp_path / "study", Space(2), IN_PLACE, None, told.append)
        assert not study.trials
        study._writer.write([Trial(Settings(), "crashed", purpose="start", note="No module named 'timm'")])
        study.close()
    assert [line.partition(";")[2] for line in told] == [" the study starts over"]


def test_a_study_stopped_before_its_first_trial_claims_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Study, "run", stopped)
    folder = tmp_path / "study"
    code = run_study(["train.py"], ["python", "train.py"], folder, frozenset(), IN_PLACE, 60.0, None, apply=False)
    assert code == 3
    said = capsys.readouterr().err
    assert "stopped; no trial has finished yet. To resume:\n  fulltilt tune" in said
    assert "are kept" not in said


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
    _write_winner(open_console(), record, settings, settings, tmp_path, apply=False)
    assert said in capsys.readouterr().out
    assert json.loads((tmp_path / "settings.json").read_text()) == {"num_workers": 4}


def test_report_shows_a_study_again_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = OwnedFolder.claim(tmp_path / "study", "study").path
    workers = Settings(num_workers=3)
    trials = [
        Trial(settings=Settings(), state="ok", purpose="start", samples_per_s=100.0, data_wait_share=0.9),
        Trial(settings=workers, state="ok", purpose="search", samples_per_s=300.0, in_force=workers),
        Trial(settings=Settings(num_workers=4), state="oom", purpose="search", note="CUDA out of memory", wall_s=24.0),
    ]
    write_json(folder / STUDY_FILE, StudyRecord(("train.py",), str(tmp_path), (), "today"))
    writer = LineWriter(folder / TRIALS_FILE)
    writer.write(trials)
    writer.close()
    before = sorted(folder.iterdir())
    with pytest.raises(SystemExit) as ended:
        main(["report", str(folder)])
    assert not ended.value.code
    said = " ".join(capsys.readouterr().out.split())
    assert "trial 1: start: 100 samples/s, waits 90 %, took – trial 2: 3 workers: 300 samples/s, took – (best)" in said
    assert "trial 3: 4 workers: out of memory (CUDA out of memory)" in said
    assert "Not verified: 3 workers looked faster, but the budget (--budget; 2m should do) ended" in said
    assert "keep your settings" in said
    assert sorted(folder.iterdir()) == before


def test_a_batch_that_fits_only_in_parts_comes_with_what_to_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = StudyRecord(("train.py",), str(tmp_path), ("accumulation", "batch"), "today")
    whole = Trial(settings=Settings(), state="oom", purpose="start")
    parts = Settings(batch_size=8, accumulation=4)
    in_parts = Trial(settings=parts, state="ok", purpose="search", samples_per_s=100.0, in_force=parts)
    end_study(record, [whole, in_parts], OwnedFolder.claim(tmp_path / "study", "study").path, apply=False)
    said = " ".join(capsys.readouterr().out.split())
    assert "(loss / 4).backward(), optimizer.step() and zero_grad() only every 4 batches" in said
    assert "To a contrastive loss that is no larger batch" in said


@pytest.mark.parametrize("theirs", ["settings.json", "trials/notes.txt"])
def test_a_folder_with_other_files_is_refused_with_their_names(
    theirs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(theirs).parent.mkdir(exist_ok=True)
    Path(theirs).write_text("the user's")
    with pytest.raises(ForeignFiles, match=f"holds files that Fulltilt did not write: {theirs.partition('/')[0]}"):
        Study(["train.py"], [], Path(), Space(2), IN_PLACE)
    assert Path(theirs).read_text() == "the user's"
    assert not Path("study.json").exists()


def test_a_trial_that_hangs_ends_with_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a process that has left its session, and nothing of either left."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import os, time\nif os.fork() == 0: os.setsid()\ntime.sleep(600)\n")
    isolation, _ = choose()
    assert isolation is not None
    study = Study(["train.py"], job_command(["train.py"]), tmp_path / "study", Space(2), isolation)
    began = time.monotonic()
    study.run(3.0, lambda *_: None, lambda _: None)
    study.close()
    (trial,) = study.trials
    assert trial.state == "timed_out"
    assert "had not reached a training loop" in (trial.note or "")
    assert time.monotonic() - began < 3.0 + 5.0
    assert not [each for each in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(each.info["cmdline"])]


def test_study_files_hold_no_secret_and_are_their_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('no training')")
    given = ["train.py", "--api-key", "hunter2", "--db=postgres://me:hunter3@host/x", "--wandb_token=hunter4"]
    study = Study(given, job_command(given), tmp_path / "study", Space(2), IN_PLACE, tell=lambda _: None)
    study.run(60.0, lambda *_: None, lambda _: None)
    study.close()
    files = [path for path in (tmp_path / "study").rglob("*") if path.is_file() and path.name != ".fulltilt"]
    assert {STUDY_FILE, TRIALS_FILE, "run.json", "output.txt"} <= {path.name for path in files}
    for path in files:
        assert path.stat().st_mode & 0o777 == 0o600, path
        assert "hunter" not in path.read_text(errors="replace"), path
    again = Study(given, job_command(given), tmp_path / "study", Space(2), IN_PLACE, tell=lambda _: None)
    again.close()  # masked as it is, it is known as the same command


@pytest.mark.parametrize("number", range(1, 12))
def test_full_disk_ends_a_study_which_then_goes_on(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """From the n-th write on there is no room: one sentence, no temporary folder left, no trial lost or torn."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    start = Trial(Settings(), "ok", 9.0, purpose="start", in_force=Settings(num_workers=0), wall_s=1.0)

    def quick(self: Study, attempt: Any, *_: Any) -> Trial:
        self.folder.make(f"trials/trial-{len(self.trials) + 1:03d}")
        write_json(self.folder.path / STUDY_FILE, self.record)
        return replace(start, settings=attempt.settings, purpose=attempt.purpose)

    monkeypatch.setattr(Study, "measure", quick)
    left = number

    def until_full(real: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(given[0]))
            return real(*given, **named)

        return call

    def tuned_here() -> int:
        arguments = ["--out", "study", "--in-place", "--budget", "60s", "train.py"]
        with pytest.raises(SystemExit) as ended:
            main(["tune", *arguments])
        return int(ended.value.code or 0)

    (tmp_path / "train.py").write_text("")
    with monkeypatch.context() as patch:
        for where, name in ((os, "write"), (os, "mkdir"), (owned_folder, "_write_new")):
            patch.setattr(where, name, until_full(getattr(where, name)))
        assert tuned_here() == 7
    told = capfd.readouterr().err
    assert "Traceback" not in told
    assert re.search(r"fulltilt: cannot write .*: No space left on device", told), told
    file = tmp_path / "study" / TRIALS_FILE
    kept = len(list(read_lines(file, Trial))) if file.exists() else 0
    assert list((tmp_path / "temporary").iterdir()) == []
    assert tuned_here() == 0
    assert f"has {kept} trial" in capfd.readouterr().err or kept == 0
