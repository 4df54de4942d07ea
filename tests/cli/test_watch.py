"""`fulltilt watch`: a screen that leaves the terminal as it was, and plain lines with the guide's status line."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fulltilt.cli.main import main
from fulltilt.probes.gpu import Gpus
from fulltilt.records import Sample
from fulltilt.store import read_lines
from fulltilt.testing import FakeNvml, no_driver, one_h200, two_t4s

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are POSIX")

if sys.platform != "win32":
    from tests.cli.terminal import ENTERED_SCREEN, LEFT_SCREEN, Terminal

CURSOR_SHOWN = b"\x1b[?25h"
CTRL_C, CTRL_Z = b"\x03", b"\x1a"
MEMORY = r"(?:n/a|\d+\.\d/\d+\.\dGB\(\d+\.\d%\))"
STATUS = rf"GPU: (?:n/a|\d+%) \| VRAM:{MEMORY} \| CPU: \d+\.\d% \| RAM:{MEMORY}"


# --------------------------------------------------------------------------- on a terminal


@pytest.mark.parametrize("key", [b"q", b"Q", CTRL_C])
def test_a_key_quits_and_the_terminal_is_as_before(key: bytes) -> None:
    with Terminal.fulltilt("watch", "--interval", "0.2") as terminal:
        terminal.wait_for_text("CPUs  load")
        assert terminal.seen.count(ENTERED_SCREEN) == 1
        terminal.type(b"x")  # any other key does nothing
        terminal.type(key)
        assert terminal.end() == 0
        assert terminal.seen.rstrip().endswith(CURSOR_SHOWN + LEFT_SCREEN)  # and nothing was said after it
        assert terminal.modes_are_restored()


def fills(screen: list[str], columns: int, lines: int) -> bool:
    return len(screen) <= lines and max(len(line.rstrip()) for line in screen) == columns


def test_it_follows_the_size_of_the_window() -> None:
    with Terminal.fulltilt("watch", "--interval", "0.2") as terminal:
        terminal.wait_for_text("CPUs  load")
        for columns, lines in ((132, 50), (40, 10)):
            terminal.resize(columns, lines)
            terminal.wait_for(lambda columns=columns, lines=lines: fills(terminal.screen().split("\n"), columns, lines))
        terminal.type(b"q")
        assert terminal.end() == 0


def test_being_killed_politely_restores_the_terminal() -> None:
    with Terminal.fulltilt("watch") as terminal:
        terminal.wait_for_text("fulltilt watch")
        os.kill(terminal.pid, signal.SIGTERM)
        assert terminal.end() == 128 + signal.SIGTERM
        assert LEFT_SCREEN in terminal.seen
        assert terminal.modes_are_restored()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs a shell with job control")
def test_ctrl_z_leaves_the_screen_and_fg_comes_back_to_it() -> None:
    with Terminal("bash", "--norc", "-i") as terminal:
        terminal.type(f"PS1='ready> '; {sys.executable} -m fulltilt watch --interval 0.2\n".encode())
        terminal.wait_for_text("CPUs  load")
        terminal.type(CTRL_Z)
        terminal.wait_for(lambda: b"Stopped" in terminal.seen)
        assert terminal.seen.rindex(LEFT_SCREEN) < terminal.seen.rindex(b"Stopped")
        terminal.type(b"fg\n")
        terminal.wait_for(lambda: terminal.seen.count(ENTERED_SCREEN) == 2)
        terminal.wait_for_text("CPUs  load")
        terminal.type(b"q")
        terminal.wait_for(lambda: terminal.seen.count(LEFT_SCREEN) == 2)
        terminal.type(b"exit\n")
        assert terminal.end() == 0


def test_a_disk_that_fills_up_ends_it_with_the_complaint_on_the_restored_terminal(tmp_path: Path) -> None:
    script = (
        "import resource, sys; from fulltilt.cli.main import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))\n"
        f"main(['watch', '--interval', '0.1', '--out', {str(tmp_path / 's.jsonl')!r}])"
    )
    with Terminal(sys.executable, "-c", script) as terminal:
        assert terminal.end() == 7
        after = terminal.seen.split(LEFT_SCREEN)[-1]
        assert b"fulltilt: cannot write" in after
        assert b"Traceback" not in terminal.seen
        assert terminal.modes_are_restored()
    assert list(read_lines(tmp_path / "s.jsonl", Sample))  # what had room is whole


def test_its_jobs_name_their_run(tmp_path: Path) -> None:
    folder = tmp_path / "20260101-train"
    job = subprocess.Popen(["sleep", "60"], env=os.environ | {"FULLTILT_RUN_DIR": str(folder)})
    try:
        with Terminal.fulltilt("watch", "--interval", "0.2") as terminal:
            terminal.wait_for(lambda: any("20260101-train" in line for line in terminal.screen().split("\n")))
            line = next(line for line in terminal.screen().split("\n") if "20260101-train" in line)
            assert line.split()[:2] == [str(job.pid), "sleep"]
            terminal.type(b"q")
            assert terminal.end() == 0
    finally:
        job.kill()
        job.wait()


# --------------------------------------------------------------------------- plain lines


def test_plain_lines_each_have_the_status_line_to_the_letter() -> None:
    command = [sys.executable, "-m", "fulltilt", "watch", "--interval", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        lines = [watch.stdout.readline().rstrip("\n") for _ in range(3)]
        watch.send_signal(signal.SIGINT)
        assert watch.wait(30) == 0
        assert watch.stderr is not None
        complaints = watch.stderr.read()
    assert all(re.search(STATUS, line) for line in lines)
    assert "Traceback" not in complaints


def once(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml, *flags: str) -> None:
    real = Gpus.open
    monkeypatch.setattr(Gpus, "open", classmethod(lambda cls, **more: real(nvml, **more)))
    with pytest.raises(SystemExit) as ended:
        main(["watch", "--once", *flags])
    assert ended.value.code == 0


def test_once_without_a_gpu_shows_the_host_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    once(monkeypatch, no_driver())
    shown = capsys.readouterr()
    assert re.fullmatch(rf"GPU: n/a \| VRAM:n/a \| CPU: \d+\.\d% \| RAM:{MEMORY}\n", shown.out)
    assert shown.err.startswith("fulltilt: no GPU: no NVIDIA driver")
    assert shown.err.count("\n") == 1


def test_once_with_two_gpus_gives_each_its_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    once(monkeypatch, two_t4s())
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"\[0\] {STATUS} \| TEMP:40/93C", first)
    assert "[0] GPU: 85% | VRAM:9.0/15.0GB(60.0%) | CPU: " in first
    assert second.startswith("[1] GPU: 0% | VRAM:0.0/15.0GB(0.0%) | CPU: ")


def test_once_shows_sm_activity_where_there_is_gpm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    once(monkeypatch, one_h200(time.monotonic, busy_after_s=0.0))
    assert capsys.readouterr().out.endswith(" | SM: 96% | TEMP:40/87C\n")


def test_readings_are_appended_to_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "samples.jsonl"
    once(monkeypatch, two_t4s(), "--out", str(out))
    monkeypatch.undo()
    once(monkeypatch, two_t4s(), "--out", str(out))
    samples = list(read_lines(out, Sample))
    assert len(samples) == 2
    assert [gpu.util_pct for gpu in samples[1].gpus] == [85.0, 0.0]
    assert samples[0].host.cpu_pct is not None


# --------------------------------------------------------------------------- bad input

# Among them what looks like a file of ours whose last line was torn by a kill.
FOREIGN = {
    "notes.txt": "mine",
    "config.json": '{\n "lr": 0.1\n}',
    "losses.jsonl": '{"loss": 1.0}\n{"lo',
    "torn.jsonl": '{"t',
}


@pytest.mark.parametrize(
    ("flags", "code", "complaint"),
    [
        (["--no-such-flag"], 2, "No such option: --no-such-flag"),
        (["--interval", "soon"], 2, "Invalid value for '--interval'"),
        (["--interval", "0"], 2, "--interval 0 is not between 0.1 and 3600 seconds"),
        (["--interval", "nan"], 2, "--interval nan is not between"),
        (["--out", "{tmp}/nowhere/s.jsonl"], 7, "cannot write {tmp}/nowhere/s.jsonl: No such file or directory"),
        (["--out", "{tmp}"], 7, "cannot write {tmp}: Is a directory"),
        (["--once", "--out", "{tmp}/pipe"], 7, "cannot write {tmp}/pipe: it is not a regular file"),
        (["--once", "--out", "/dev/null"], 7, "cannot write /dev/null: it is not a regular file"),
        *((["--out", f"{{tmp}}/{name}"], 2, f"{{tmp}}/{name} exists and does not hold readings") for name in FOREIGN),
    ],
)
def test_bad_input_is_one_or_two_lines_before_the_screen_opens(
    flags: list[str], code: int, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in FOREIGN.items():
        (tmp_path / name).write_text(text)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SystemExit) as ended:
        main(["watch", *(flag.format(tmp=tmp_path) for flag in flags)])
    shown = capsys.readouterr()
    assert ended.value.code == code
    assert shown.out == ""
    assert len(shown.err.splitlines()) <= 2
    assert complaint.format(tmp=tmp_path) in shown.err
    assert {name: (tmp_path / name).read_text() for name in FOREIGN} == FOREIGN


def test_an_unwritable_file_is_refused_before_the_screen_opens(tmp_path: Path) -> None:
    with Terminal.fulltilt("watch", "--out", str(tmp_path / "nowhere" / "s.jsonl")) as terminal:
        assert terminal.end() == 7
        assert ENTERED_SCREEN not in terminal.seen
        assert b"cannot write" in terminal.seen
