"""A trial deletes, overwrites and fills what it likes: outside of it nothing changes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from fulltilt.figures import one_line
from fulltilt.tuning.search_space import Space
from fulltilt.tuning.study import Study
from fulltilt.tuning.trial import isolation
from fulltilt.tuning.trial.isolation import FORCED, Isolation, choose, descendants, kill_descendants, remove_scratch

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux's own means")
as_root = pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="becomes another user")
AS_USER = [sys.executable, str(Path(__file__).with_name("as_user.py"))]

# By a shell, by libraries in C, and by Python; then what it sees of it.
HAVOC = """
import os, shutil, sqlite3, subprocess, tempfile
subprocess.run("rm -rf ckpt; mkdir ckpt; echo new > ckpt/new; chmod 777 data.npy", shell=True)
sqlite3.connect("runs.db").execute("create table steps (loss)").connection.commit()
open("data.npy", "w").write("overwritten")
os.rename("notes.txt", "gone.txt")
open(os.path.join(ELSEWHERE, "abroad.txt"), "w").write("x")
os.remove(os.path.join(ELSEWHERE, "theirs.txt"))
open("/dev/shm/fulltilt-test-segment", "w").write("x")
with tempfile.NamedTemporaryFile(): pass
assert {*os.listdir(".")} - {"study"} == {"ckpt", "data.npy", "gone.txt", "runs.db", "train.py"}, os.listdir(".")
assert os.listdir("ckpt") == ["new"] and open("data.npy").read() == "overwritten"
"""
H5 = """
import h5py
with h5py.File("curves.h5", "a") as file: file["loss"] = [1.0, 2.0]
"""
TRAINING = """
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.save(model.state_dict(), "model.pt")
torch.load("model.pt")
while True:
    for (batch,) in DataLoader(TensorDataset(torch.randn(512, 4)), batch_size=8):
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()
"""


@pytest.fixture
def job() -> Iterator[Path]:
    """The folder of a job, with files of its user's beside and elsewhere, which an ordinary user can reach."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        Path(place).chmod(0o755)
        yield _files_in(Path(place))


def _files_in(place: Path) -> Path:
    folder, elsewhere = place / "job", place / "elsewhere"
    (folder / "ckpt").mkdir(parents=True)
    elsewhere.mkdir()
    for path in (folder / "ckpt/best.pt", folder / "data.npy", folder / "notes.txt", elsewhere / "theirs.txt"):
        path.write_bytes(os.urandom(1000))
    (folder / "data.npy").chmod(0o640)
    (folder / "train.py").write_text(HAVOC.replace("ELSEWHERE", repr(str(elsewhere))))
    return folder


def state(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Mode, owner and hash of everything below the folder of a test, without the study's own."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if "study" not in path.relative_to(folder).parts:
            text = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
            found[str(path.relative_to(folder))] = (path.stat().st_mode, path.stat().st_uid, text)
    return found


def give_away(folder: Path) -> None:
    """Make a test's files those of the ordinary user."""
    for path in (folder, *folder.rglob("*")):
        os.chown(path, 65534, 65534)


def run(
    isolation: Isolation, folder: Path, command: list[str], as_user: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a command as a trial is run."""
    code = f"""
import subprocess, sys
from pathlib import Path
from fulltilt.tuning.trial.isolation import Isolation, remove_scratch
isolation = {isolation!r}
scratch = isolation.scratch()
(Path("..") / "records").mkdir(exist_ok=True)
ended = subprocess.run(isolation.command({command!r}, scratch, Path("..") / "records"))
remove_scratch(scratch)
sys.exit(scratch.exists() and "the scratch folder is still there" or ended.returncode)
"""
    who = AS_USER if as_user else []
    return subprocess.run(
        [*who, sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )


ROOT = Isolation("namespace")
ROOT_IN_MEMORY = Isolation("namespace", in_memory=True)
USER = Isolation("namespace", with_user=True)
USER_IN_MEMORY = Isolation("namespace", in_memory=True, with_user=True)


@as_root
@pytest.mark.parametrize(
    ("kept_apart", "as_user"), [(ROOT, False), (ROOT_IN_MEMORY, False), (USER, True), (USER_IN_MEMORY, True)]
)
def test_a_namespace_keeps_every_write_of_a_trial(kept_apart: Isolation, as_user: bool, job: Path) -> None:
    if as_user:
        give_away(job.parent)
    before = state(job.parent)
    ended = run(kept_apart, job, [sys.executable, "train.py"], as_user)
    assert ended.returncode == 0, ended.stderr
    after = state(job.parent)
    after.pop("records")
    assert after == before
    assert not Path("/dev/shm/fulltilt-test-segment").exists()


ENDS_ANOTHER = """
import os, signal, subprocess, sys
subprocess.Popen(["sleep", "60"]).terminate()  # its own
try:
    os.kill(int(sys.argv[1]), signal.SIGKILL)
except PermissionError:
    print("refused")
"""


@as_root
@pytest.mark.parametrize("kept_apart", [ROOT, USER, Isolation("landlock")])
def test_a_trial_ends_no_process_outside_of_it(kept_apart: Isolation, job: Path) -> None:
    """As a script does that ends the run before it."""
    if not scopes_signals():
        pytest.skip("Linux 6.12's means")
    with subprocess.Popen(["sleep", "600"]) as training:
        try:
            ended = run(kept_apart, job, [sys.executable, "-c", ENDS_ANOTHER, str(training.pid)])
            assert (ended.stdout, ended.returncode) == ("refused\n", 0), ended.stderr
            assert training.poll() is None
        finally:
            training.kill()


def scopes_signals() -> bool:
    try:
        return isolation._landlock_version() >= isolation.SCOPES
    except OSError:
        return False


@as_root
@pytest.mark.parametrize(("kept_apart", "as_user"), [(ROOT, False), (USER, True)])
def test_data_in_shared_memory_are_seen_and_stay(kept_apart: Isolation, as_user: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="fulltilt-", dir="/dev/shm") as place:
        Path(place).chmod(0o755)
        job = _files_in(Path(place))
        if as_user:
            give_away(Path(place))
        before = state(Path(place))
        ended = run(kept_apart, job, [sys.executable, "train.py"], as_user)
        assert ended.returncode == 0, ended.stderr
        after = state(Path(place))
        after.pop("records")
        assert after == before


@pytest.mark.parametrize("write", ["open('notes.txt', 'a')", "os.remove('notes.txt')", "os.mkdir('new')"])
def test_landlock_refuses_writes_outside_of_the_scratch_folder(write: str, job: Path) -> None:
    before = state(job.parent)
    (job / "train.py").write_text(f"import os\n{write}\n")
    before["job/train.py"] = state(job)["train.py"]
    ended = run(Isolation("landlock"), job, [sys.executable, "train.py"])
    assert ended.returncode == 1
    assert "PermissionError: [Errno 13] Permission denied: 'n" in ended.stderr
    after = state(job.parent)
    after.pop("records")
    assert after == before


@pytest.mark.parametrize("kept_apart", [Isolation("landlock"), *([ROOT] if os.geteuid() == 0 else [])])
def test_records_of_a_trial_are_written_where_they_belong(kept_apart: Isolation, job: Path) -> None:
    run(kept_apart, job, [sys.executable, "-c", "open('../records/answer.json', 'w').write('{}')"])
    assert (job.parent / "records" / "answer.json").read_text() == "{}"


@pytest.mark.parametrize(
    "kept_apart", [Isolation("none"), Isolation("landlock"), *([ROOT] if os.geteuid() == 0 else [])]
)
def test_a_killed_trial_takes_all_its_processes_with_it(kept_apart: Isolation, tmp_path: Path) -> None:
    """Also those that have left its session, as daemons do."""
    (tmp_path / "records").mkdir()
    sleeps = (
        f"import os, time; os.fork(); os.setsid(); open('{tmp_path}/records/' + str(os.getpid()), 'w'); time.sleep(600)"
    )
    scratch = kept_apart.scratch()
    process = subprocess.Popen(
        kept_apart.command([sys.executable, "-c", sleeps], scratch, tmp_path / "records"), start_new_session=True
    )
    deadline = time.monotonic() + 60
    while len(os.listdir(tmp_path / "records")) < 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    below = descendants(process.pid)
    assert below
    other = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    kill_descendants(process.pid)
    process.kill()
    process.wait()
    assert other.wait() == 7, "it is not one of the trial's"
    while any(_runs(pid) for pid in below) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(_runs, below))
    remove_scratch(scratch)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_signal_that_ends_the_job_is_seen_outside(job: Path) -> None:
    ended = run(Isolation("none"), job, ["sh", "-c", "kill -SEGV $$"])
    assert ended.returncode == 128 + 11


@pytest.mark.parametrize("kept_apart", [Isolation("none"), *([ROOT, USER] if os.geteuid() == 0 else [])])
def test_a_killed_study_leaves_neither_trial_nor_its_files(kept_apart: Isolation, tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    (tmp_path / "caches").mkdir()
    code = f"""
import subprocess, sys, time
from pathlib import Path
from fulltilt.tuning.trial.isolation import Isolation
isolation = {kept_apart!r}
scratch = isolation.scratch()
sleeps = "import os, time; open(f'{tmp_path}/records/{{os.getpid()}}', 'w'); time.sleep(600)"
records, caches = Path({str(tmp_path / "records")!r}), Path({str(tmp_path / "caches")!r})
command = isolation.command([sys.executable, "-c", sleeps], scratch, records, temporary=[caches])
trial = subprocess.Popen(command)
print(trial.pid, scratch, flush=True)
time.sleep(600)
"""
    study = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert study.stdout is not None
    pid, scratch = study.stdout.readline().split()
    deadline = time.monotonic() + 60
    while not os.listdir(tmp_path / "records") and time.monotonic() < deadline:
        time.sleep(0.02)
    processes = [int(pid), *descendants(int(pid))]
    study.kill()
    study.wait()
    while any(map(_runs, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(processes) == 2
    assert not any(map(_runs, processes))
    assert not Path(scratch).exists()
    assert not (tmp_path / "caches").exists()


@pytest.mark.parametrize("kept_apart", [Isolation("none"), Isolation("landlock"), ROOT, ROOT_IN_MEMORY])
def test_scratch_folders_are_their_users_alone(
    kept_apart: Isolation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study").mkdir()
    before = os.umask(0)
    try:
        study = Study(["train.py"], ["python", "train.py"], tmp_path / "study", Space(2), kept_apart)
        folders = [kept_apart.scratch(), study._caches]
    finally:
        os.umask(before)
    assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o700, 0o700]
    remove_scratch(folders[0])
    study.close()
    assert not any(folder.exists() for folder in folders)


def test_without_any_means_trials_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "_probe", lambda candidate: f"no {candidate.kind}")
    assert choose() == (None, ["no namespace", "no landlock"])
    assert choose(in_place=True)[0] == Isolation("none")


def test_landlock_does_not_do_where_it_cannot_protect_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch_1_2_3").touch()
    assert isolation._files_in_shared_memory(str(tmp_path)) is None
    (tmp_path / "cache.npy").touch()
    assert "cache.npy" in (isolation._files_in_shared_memory(str(tmp_path)) or "")
    monkeypatch.setattr(isolation, "_libc_call", lambda what, *_: 2)  # the version, of Linux 5.19
    with pytest.raises(OSError, match="lets files be truncated"):
        isolation._apply_landlock([str(tmp_path)])


# --------------------------------------------------------------------------- the whole verb


def tune(folder: Path, forced: str | None, *flags: str, as_user: bool = False) -> subprocess.CompletedProcess[str]:
    environment: Mapping[str, str] = {**os.environ, **({FORCED: forced} if forced else {})}
    command = [sys.executable, "-m", "fulltilt", "tune", "--budget", "120s", "--out", "study", *flags, "train.py"]
    return subprocess.run(
        [*(AS_USER if as_user else []), *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )


@as_root
@pytest.mark.parametrize("as_user", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_tuning_a_destructive_script_changes_nothing(as_user: bool, job: Path) -> None:
    script = job / "train.py"
    script.write_text(script.read_text() + H5 + TRAINING)
    if as_user:
        give_away(job.parent)
    before = state(job.parent)
    done = tune(job, None, as_user=as_user)
    assert done.returncode == 0, done.stderr
    assert "trials change none of your files" in one_line(done.stderr)
    assert "trial 1: start:" in done.stdout + done.stderr
    assert state(job.parent) == before
    assert not Path("/dev/shm/fulltilt-test-segment").exists()


@pytest.mark.slow
def test_without_namespaces_saves_are_redirected_and_other_writes_refused(job: Path) -> None:
    script = job / "train.py"
    destructive = script.read_text()
    script.write_text(TRAINING)
    before = state(job.parent)
    done = tune(job, "landlock")
    assert done.returncode == 0, done.stderr
    assert "trials can write to their scratch folder only (Landlock)" in one_line(done.stderr)
    assert state(job.parent) == before
    script.write_text(destructive.partition("chmod")[0] + '", shell=True)\nopen("data.npy", "w")\n' + TRAINING)
    before = state(job.parent)
    done = tune(job, "landlock", "--trial-limit", "60s", "--allow", "batch", "--out", "study2")
    assert done.returncode == 2
    assert "a trial may not write data.npy" in done.stderr
    after = state(job.parent)
    assert {name: found for name, found in after.items() if "study" not in name} == before


@pytest.mark.slow
def test_in_place_trials_change_the_files_themselves(job: Path) -> None:
    script = job / "train.py"
    script.write_text("open('data.npy', 'w').write('new')\n" + TRAINING)
    refused = tune(job, "none")
    assert refused.returncode != 0
    assert "this system cannot isolate trials from your files" in refused.stderr
    assert not (job / "study").exists()
    done = tune(job, None, "--in-place")
    assert done.returncode == 0, done.stderr
    assert "trials run in place (--in-place)" in one_line(done.stderr)
    assert (job / "data.npy").read_text() == "new"
    assert (job / "model.pt").exists()
