"""`fulltilt run` behaves as Python does without it: arguments, streams, signals, exit code and traceback."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from fulltilt import store
from fulltilt.cli.main import main
from fulltilt.cli.run import end_run
from fulltilt.errors import RunFolderError
from fulltilt.figures import one_line
from tests.report import examples

PLAIN = [sys.executable]
OBSERVED = [sys.executable, "-m", "fulltilt", "run", "--out", "run", "--"]

ODDITIES = """
import os, signal, sys
print(sys.argv, __name__, __file__, os.path.basename(sys.path[0]), sys.modules["__main__"].__spec__)
print("in:", sys.stdin.read())
print("to stderr", end="", file=sys.stderr)
def stop(number, frame):
    print("caught", number, flush=True)
    raise SystemExit(7)
signal.signal(signal.SIGTERM, stop)
os.kill(os.getpid(), signal.SIGTERM)
"""

TRAINS = """
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range({epochs}):
    for x, y in DataLoader(TensorDataset(torch.randn(64, 4), torch.zeros(64, dtype=torch.long)), batch_size=8):
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    {after}
"""


def run(command: list[str], folder: Path, **kwargs: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, timeout=120, **kwargs)  # type: ignore


def both(folder: Path, script: str, *arguments: str, stdin: str = "") -> tuple[subprocess.CompletedProcess[str], ...]:
    (folder / "job.py").write_text(script)
    plain = run([*PLAIN, "job.py", *arguments], folder, input=stdin)
    observed = run([*OBSERVED, "job.py", *arguments], folder, input=stdin)
    return plain, observed


def state(folder: Path) -> dict[str, object]:
    return json.loads((folder / "run" / "run.json").read_text())  # type: ignore[no-any-return]


def test_a_script_with_habits_behaves_as_without(tmp_path: Path) -> None:
    plain, observed = both(tmp_path, ODDITIES, "--lr", "0.1", "-x", stdin="hello\nthere")
    assert plain.returncode == observed.returncode == 7
    assert observed.stdout == plain.stdout
    assert "caught 15" in plain.stdout
    assert observed.stderr.startswith(f"{plain.stderr}\nThe script ended"), "the verdict begins a line of its own"
    assert state(tmp_path)["state"] == "crashed"
    assert state(tmp_path)["exit_code"] == 7


def test_the_job_inherits_what_the_shell_has_opened_for_it(tmp_path: Path) -> None:
    """`fulltilt run train.py <(list of files)`."""
    reads, writes = os.pipe()
    os.write(writes, b"from the shell")
    os.close(writes)
    done = run([*OBSERVED, "cat", f"/dev/fd/{reads}"], tmp_path, pass_fds=(reads,))
    os.close(reads)
    assert done.stdout == "from the shell"


def test_a_traceback_is_the_scripts_own(tmp_path: Path) -> None:
    plain, observed = both(tmp_path, "def f():\n    raise ValueError('mine')\nf()\n")
    assert plain.returncode == observed.returncode == 1
    assert observed.stderr.startswith(plain.stderr)
    assert "fulltilt/" not in observed.stderr.split("ValueError: mine")[0]
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize(
    "breaks",
    [
        "next(iter(DataLoader(Broken())))",
        "next(iter(DataLoader(Broken(), num_workers=1)))",
        "torch.zeros(1).sum().backward()",
        "torch.save(torch.zeros(1), 'no/such/folder')",
    ],
)
@pytest.mark.slow
def test_an_error_that_passes_through_torch_is_shown_as_without_us(tmp_path: Path, breaks: str) -> None:
    broken = (
        "class Broken(list):\n    __len__ = lambda self: 3\n    def __getitem__(self, index): raise KeyError(index)\n"
    )
    plain, observed = both(tmp_path, f"import torch\nfrom torch.utils.data import DataLoader\n{broken}{breaks}\n")
    assert plain.returncode == observed.returncode == 1
    assert "Error" in plain.stderr
    assert observed.stderr.startswith(plain.stderr), observed.stderr


def test_a_module_runs_as_with_python_m(tmp_path: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "job.py").write_text("import sys; print(__name__, __package__, sys.argv[1:])")
    plain = run([*PLAIN, "-m", "pack.job", "-a", "b"], tmp_path)
    observed = run([sys.executable, "-m", "fulltilt", "run", "--out", "run", "-m", "pack.job", "-a", "b"], tmp_path)
    assert observed.stdout == plain.stdout == "__main__ pack ['-a', 'b']\n"


def test_a_signal_to_fulltilt_reaches_the_job_and_ends_both_the_same(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(60)\n")
    process = subprocess.Popen([*OBSERVED, "job.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == -signal.SIGTERM
    assert state(tmp_path)["state"] == "killed"


def test_a_job_that_handles_interrupts_goes_on(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import signal, time\n"
        "signal.signal(signal.SIGINT, lambda *_: print('not now', flush=True))\n"
        "print('up', flush=True)\ntime.sleep(1.5)\nprint('done')\n"
    )
    process = subprocess.Popen([*OBSERVED, "job.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert (out, process.returncode) == ("not now\ndone\n", 0)


@pytest.mark.parametrize("number", [signal.SIGXCPU, signal.SIGALRM, signal.SIGPWR, signal.SIGRTMIN + 1])
def test_a_job_saves_on_whatever_signal_its_batch_system_sends(number: int, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import signal, sys, time\n"
        f"signal.signal({int(number)}, lambda *_: (time.sleep(0.3), print('saved', flush=True), sys.exit(3)))\n"
        "print('begun', flush=True)\ntime.sleep(30)\n"
    )
    command = [sys.executable, "-m", "fulltilt", "run", "--out", "out", "job.py"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(number)
    assert process.stdout.read() == "saved\n"
    assert process.wait(timeout=60) == 3


@pytest.mark.slow
def test_a_signal_to_the_whole_group_reaches_the_job_once(tmp_path: Path) -> None:
    """As `timeout` and schedulers send it: a second SIGTERM often means to stop at once."""
    (tmp_path / "job.py").write_text(
        "import signal\n"
        "for number in (signal.SIGTERM, signal.SIGUSR1):\n"
        "    signal.signal(number, lambda number, _: print(number, flush=True))\n"
        "print('up', flush=True)\n"
        "signal.signal(signal.SIGALRM, lambda *_: exit())\nsignal.alarm(3)\n"
        "while True:\n    signal.pause()\n"
    )
    start = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen([*OBSERVED, "job.py"], cwd=tmp_path, **start)  # type: ignore[call-overload]
    assert process.stdout.readline() == "up\n"
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGTERM)
    time.sleep(0.5)
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0].split() == ["15", "10", "15"]
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # nobody is left of the group


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux ends the job with its parent")
def test_the_job_ends_with_whoever_records_it(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n")
    process = subprocess.Popen([*OBSERVED, "job.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    job = int(process.stdout.readline())
    process.kill()
    assert process.wait(timeout=60) == -signal.SIGKILL
    assert process.stdout.read() == ""  # the job's own end of the pipe is closed
    with contextlib.suppress(psutil.NoSuchProcess):  # it lets go of the pipe before it has ended
        while psutil.Process(job).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)


def test_a_killed_job_leaves_a_diagnosed_run(tmp_path: Path) -> None:
    script = TRAINS.format(epochs=10**6, after="print('epoch', flush=True)")
    (tmp_path / "job.py").write_text(script)
    process = subprocess.Popen([*OBSERVED, "job.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    deadline = time.monotonic() + 100
    steps = tmp_path / "run" / "steps.jsonl"
    # The first line is the start-up.
    while not (steps.exists() and steps.read_text().count("\n") > 1) and time.monotonic() < deadline:
        process.stdout.readline()
    children = subprocess.check_output(["pgrep", "-P", str(process.pid)], text=True).split()
    os.kill(int(children[0]), signal.SIGKILL)
    process.stdout.read()
    assert process.wait(timeout=60) == -signal.SIGKILL
    answer = json.loads((tmp_path / "run" / "findings.json").read_text())
    assert answer["throughput"]["steps"] > 0
    assert state(tmp_path)["state"] == "killed"


@pytest.mark.parametrize("code", [0, 5])
def test_a_reader_that_has_gone_changes_no_exit_code(tmp_path: Path, code: int) -> None:
    (tmp_path / "job.py").write_text(f"import sys\nsys.exit({code})\n")
    reader, writer = os.pipe()
    os.close(reader)  # as head does once it has its lines
    try:
        job = subprocess.run([*OBSERVED, "job.py"], cwd=tmp_path, stdout=writer, stderr=writer, check=False, timeout=60)
    finally:
        os.close(writer)
    assert job.returncode == code
    assert state(tmp_path)["exit_code"] == code


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("code", [0, 5])
@pytest.mark.slow
def test_a_log_on_a_full_disk_neither_keeps_the_job_from_running_nor_changes_its_exit_code(
    tmp_path: Path, code: int
) -> None:
    (tmp_path / "job.py").write_text(f"import sys\nprint('ran', file=open('ran', 'a'))\nsys.exit({code})\n")
    for _ in range(2):  # the second time there is something to tell before the job starts
        with open("/dev/full", "w") as full:  # noqa: PTH123 - a device
            job = subprocess.run([*OBSERVED, "job.py"], cwd=tmp_path, stderr=full, check=False, timeout=60)
        assert job.returncode == code
    assert (tmp_path / "ran").read_text() == "ran\nran\n"
    assert state(tmp_path)["exit_code"] == code


def test_a_record_that_cannot_be_written_is_told_of_with_its_remedy_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(folder: Path) -> None:
        raise RunFolderError(f"cannot write {folder}/run.json: No space left on device", "Free some space.")

    folder = examples.write_folder(tmp_path / "run", examples.starved()[0])
    monkeypatch.setattr("fulltilt.report.answer.explain", full)
    end_run(folder, store.load(folder).run, wall_s=1.0, status=5)
    assert capsys.readouterr().err.endswith("/run.json: No space left on device\n  Free some space.\n")


def test_auto_says_that_it_found_nothing_to_tune(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fed = examples.starved()[0]
    drawn = replace(fed, ranks=tuple(replace(rank, loaders=(), workers=(), live=()) for rank in fed.ranks))
    for name, run, told in (("a", fed, False), ("b", drawn, True)):
        folder = examples.write_folder(tmp_path / name, run)
        end_run(folder, store.load(folder).run, wall_s=1.0, status=0, tuned=True)
        assert ("--auto found nothing to tune" in capsys.readouterr().err) == told


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ("probes.sampler:Sampler.start", "The script ended with exit code 5 before its first training step"),
        ("probes.sampler:Sampler.stop", "The script ended with exit code 5 before its first training step"),
        ("cli.run:store.LineWriter", "The script ended with exit code 5 before its first training step"),
        ("report.answer:explain", "this run could not be explained because of a bug in Fulltilt (ZeroDivisionError"),
        ("recorder.rank_files:SpanFollower.read", "The script ended with exit code 5 before its first training step"),
    ],
)
@pytest.mark.slow
def test_a_mistake_of_ours_changes_neither_the_job_nor_its_exit_code(tmp_path: Path, broken: str, told: str) -> None:
    module, _, name = broken.partition(":")
    command = (
        f"import fulltilt.{module} as module\n"
        f"module.{name} = lambda *given: 1 / 0\n"
        "from fulltilt.cli.main import main\n"
        "main(['run', '--out', 'run', '--', '-c', 'import time; time.sleep(1.5); print(1); raise SystemExit(5)'])\n"
    )
    done = subprocess.run([sys.executable, "-c", command], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (5, "1\n")
    assert "Traceback" not in done.stderr
    assert told in one_line(done.stderr)
    assert state(tmp_path)["exit_code"] == 5


@pytest.mark.slow
def test_a_script_that_ends_with_143_was_not_killed(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(TRAINS.format(epochs=2, after="pass") + "raise SystemExit(143)")
    done = run([*OBSERVED, "job.py"], tmp_path)
    assert (done.returncode, state(tmp_path)["state"]) == (143, "crashed")
    assert "the script ended with exit code 143 after 16 steps" in one_line(done.stderr)


def test_a_job_that_goes_into_the_background_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import os, time\nif child := os.fork():\n    print(child, flush=True)\n    os._exit(0)\n"
        "os.closerange(0, 3)\ntime.sleep(20)\n"
    )
    done = run([*OBSERVED, "job.py"], tmp_path)
    os.kill(int(done.stdout), signal.SIGKILL)
    said = f"goes on in the background (process {done.stdout.strip()}); once it is done: fulltilt report run"
    assert said in done.stderr
    (tmp_path / "job.py").write_text("print(1)")
    assert "background" not in run([*OBSERVED, "job.py"], tmp_path).stderr


@pytest.mark.slow
def test_the_verdict_is_told_where_it_cannot_be_written(tmp_path: Path) -> None:
    command = (
        "import fulltilt.report.answer as module\n"
        "from fulltilt.errors import RunFolderError\n"
        "def explain(folder): raise RunFolderError(f'cannot write {folder}/findings.json: No space left on device')\n"
        "module.explain = explain\n"
        "from fulltilt.cli.main import main\n"
        "main(['run', '--out', 'run', 'job.py'])\n"
    )
    (tmp_path / "job.py").write_text(TRAINS.format(epochs=2, after="__import__('time').sleep(0.8)"))
    done = subprocess.run([sys.executable, "-c", command], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 0
    assert "the script's own code takes 9" in one_line(done.stderr)
    assert done.stderr.endswith("fulltilt: cannot write run/findings.json: No space left on device\n")
    assert "report:" not in done.stderr


def test_a_job_whose_process_the_kernel_killed_for_memory_says_so(tmp_path: Path) -> None:
    command = (
        "from fulltilt.cli import main, run\n"
        "counts = iter((3, 4))\n"
        "run.oom_kills = lambda: next(counts)\n"
        "main.main(['run', '--out', 'run', '--', '-c', 'raise SystemExit(1)'])\n"
    )
    done = subprocess.run([sys.executable, "-c", command], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "exit code 1 before its first training step, and the kernel killed 1 process for lack" in one_line(
        done.stderr
    )
    assert state(tmp_path)["oom_kills"] == 1


def test_the_training_is_recorded_with_where_the_loader_is(tmp_path: Path) -> None:
    """Also when the script empties its environment and goes to another folder before it imports torch."""
    elsewhere = "import os, tempfile; os.environ.clear(); os.chdir(tempfile.mkdtemp())"
    (tmp_path / "job.py").write_text(elsewhere + TRAINS.format(epochs=3, after="pass"))
    done = run([*OBSERVED, "job.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    rank = json.loads((tmp_path / "run" / "rank-0.json").read_text())
    assert (rank["steps"], rank["optimizers"]) == (24, ["SGD"])
    assert [(loader["where"], loader["constructed"]) for loader in rank["loaders"]] == [("job.py:8", 3)]
    answer = json.loads((tmp_path / "run" / "findings.json").read_text())
    assert (answer["throughput"]["steps"], answer["throughput"]["samples"]) == (24, 192)
    ledger = answer["ledger"]
    assert sum(ledger["buckets"].values()) == pytest.approx(ledger["wall_s"], rel=1e-6)


@pytest.mark.slow
def test_what_a_forked_child_trains_on_the_side_is_not_the_jobs(tmp_path: Path) -> None:
    # Its record begins within a second; a child that trains before then would take its place in the folder.
    train = "exec('[step() for _ in range(500)]; raise SystemExit')"
    fork = f"import os, time; time.sleep(1.5); child = os.fork() or {train}; os.waitpid(child, 0)"
    script = TRAINS.format(epochs=3, after=fork).replace(
        "for epoch", "def step():\n    model(torch.zeros(1, 4)).sum().backward()\n    optimizer.step()\nfor epoch", 1
    )
    (tmp_path / "job.py").write_text(script)
    assert run([*OBSERVED, "job.py"], tmp_path).returncode == 0
    assert (tmp_path / "run" / "rank-1.json").exists()
    assert json.loads((tmp_path / "run" / "findings.json").read_text())["throughput"]["steps"] == 24


def test_an_earlier_run_in_the_folder_is_kept(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("print('x')")
    first = run([*OBSERVED, "job.py"], tmp_path)
    before = (tmp_path / "run" / "run.json").read_text()
    second = run([*OBSERVED, "job.py"], tmp_path)
    assert first.returncode == second.returncode == 0
    assert (tmp_path / "run" / "before-1" / "run.json").read_text() == before
    assert "before-1" in second.stderr


def test_a_run_keeps_others_out_of_its_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script, folder = tmp_path / "job.py", tmp_path / "run"
    script.write_text("print('ran')")
    store.write_json(store.create_folder(folder) / "run.json", {})
    owned = store.OwnedFolder(folder)
    with owned.locked("mine"), pytest.raises(SystemExit) as refused:
        main(["run", "--out", str(folder), str(script)])
    assert refused.value.code == 2
    out, err = capfd.readouterr()
    assert f"another run is writing into {folder}" in err
    assert "ran" not in out
    assert store.read_json(folder / "run.json") == {}
    with owned.locked("mine"):
        pass  # it is free again


FOREIGN = ("report.html", "findings.json", "samples.jsonl", "settings.json")


@pytest.mark.parametrize("beside_a_run", [False, True])
def test_foreign_files_in_the_run_folder_are_refused(
    beside_a_run: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script, folder = tmp_path / "job.py", tmp_path / "run"
    script.write_text("print('ran')")
    folder.mkdir()
    if beside_a_run:
        store.write_json(store.create_folder(folder) / "run.json", {})
    for name in FOREIGN:
        (folder / name).write_text(f"my {name}")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(SystemExit) as refused:
        main(["run", "--out", str(folder), str(script)])
    out, err = capfd.readouterr()
    assert (refused.value.code, out) == (2, "")
    assert "holds files that Fulltilt did not write" in err
    assert all(name in err for name in FOREIGN)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_hostile_name_is_escaped_in_errors(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["run", "--out", str(tmp_path / "run"), "\x1b]0;owned\x07\x1b[2J[red]\u202egpj.py"])
    err = capfd.readouterr().err
    assert refused.value.code == 2
    assert "[red]" in err
    assert not {"\x1b", "\x07", "\u202e"} & set(err)


def test_a_file_for_a_run_folder_is_bad_usage(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "job.py"
    script.write_text("print('ran')")
    with pytest.raises(SystemExit) as refused:
        main(["run", "--out", str(script), str(script)])
    assert refused.value.code == 2
    assert "is a file, not a folder" in capfd.readouterr().err


def test_the_users_own_sitecustomize_still_runs(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import builtins; builtins.mine = 42")
    (tmp_path / "job.py").write_text("import sys; print(mine, [p for p in sys.path if 'bootstrap' in p])")
    done = run([*OBSERVED, "job.py"], tmp_path, env={**os.environ, "PYTHONPATH": str(own)})
    assert done.stdout == "42 []\n", done.stderr


@pytest.mark.slow
def test_settings_are_put_in_force(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text('{"num_workers": 2, "prefetch_factor": 3, "persistent_workers": true}')
    (tmp_path / "job.py").write_text(
        TRAINS.format(epochs=2, after="pass").replace("batch_size=8", "batch_size=8, shuffle=True")
    )
    command = [sys.executable, "-m", "fulltilt", "run", "--out", "run", "--settings", "s.json", "job.py"]
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "workers that persist (--settings) later epochs are shuffled differently" in one_line(done.stderr)
    (loader,) = json.loads((tmp_path / "run" / "rank-0.json").read_text())["loaders"]
    assert (loader["num_workers"], loader["prefetch_factor"], loader["persistent_workers"]) == (2, 3, True)
    assert loader["batch_size"] == 8


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["missing.py"], "missing.py does not exist"),
        ([], "nothing to run"),
        (["--what", "job.py"], "--what"),
        (["--settings", "none.json", "job.py"], "none.json"),
        (["--settings", "batch.json", "job.py"], "batch_size would change what is trained"),
        (["--settings", "typo.json", "job.py"], "num_worker"),
        (["no-such-program-here"], "neither a script nor a program"),
        (["--deep", "-1", "job.py"], "--deep"),
        (["-m"], "-m"),
    ],
)
def test_a_mistake_costs_two_lines_and_exit_code_2(tmp_path: Path, arguments: list[str], says: str) -> None:
    (tmp_path / "job.py").write_text("print('ran')")
    (tmp_path / "batch.json").write_text('{"batch_size": 4}')
    (tmp_path / "typo.json").write_text('{"num_worker": 4}')
    done = run([sys.executable, "-m", "fulltilt", "run", *arguments], tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 3
    assert "ran" not in done.stdout


def test_an_unwritable_folder_is_the_machines_fault(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("print('ran')")
    (tmp_path / "file").write_text("")
    done = run([sys.executable, "-m", "fulltilt", "run", "--out", "file/run", "job.py"], tmp_path)
    assert done.returncode == 7
    assert "Traceback" not in done.stderr
    assert "ran" not in done.stdout


@pytest.mark.parametrize("refusal", [PermissionError(13, "Permission denied"), OSError(36, "File name too long")])
def test_a_path_that_may_not_be_looked_at_costs_two_lines(
    refusal: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, closed = tmp_path / "job.py", tmp_path / "closed" / "run"
    script.write_text("print('ran')")
    refusal.filename = str(closed)

    def refuse(*_: object) -> Path:
        raise refusal

    monkeypatch.setattr("fulltilt.cli.run.run_folder", refuse)
    with pytest.raises(SystemExit) as ended:
        main(["run", "--out", str(closed), str(script)])
    assert ended.value.code == 7
    assert capsys.readouterr().err.splitlines()[0] == f"fulltilt: cannot use {closed}: {refusal.strerror}"
