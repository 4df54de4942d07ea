"""`fulltilt check`: one screen or one JSON object; bad usage is two lines and exit 2."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulltilt.cli.check import parse_bytes
from fulltilt.cli.main import main
from fulltilt.errors import UsageError
from fulltilt.probes.gpu import Gpus
from fulltilt.records import CheckLine, Machine, StorageReading
from fulltilt.store import decode
from fulltilt.testing import FakeClock, FakeNvml, lost_gpu, no_driver, one_h200, shared_gpu, throttled_gpu, two_t4s

ROOT = Path(__file__).parents[2]


def use(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml) -> None:
    real = Gpus.open
    monkeypatch.setattr(Gpus, "open", classmethod(lambda cls, **more: real(nvml, **more)))


def check(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["check", *flags])
    shown = capsys.readouterr()
    assert ended.value.code == 0, shown.err
    assert shown.err == ""
    return shown.out


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number}.jpg").write_bytes(os.urandom(20_000))
    return folder


def test_one_gpu_fits_on_one_screen_of_80_by_24(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], data: Path
) -> None:
    use(monkeypatch, one_h200(time.monotonic, busy_after_s=float("inf")))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(data.parent)
    lines = check(capsys, "--data", "data").splitlines()
    shown = "\n".join(lines)
    assert len(lines) <= 24
    assert all(len(line) <= 80 and line == line.rstrip() for line in lines)
    for part in ("usable", "/dev/shm", "preflight", "141 of 141 GiB free"):
        assert part in shown
    assert "ok   GPU         1 × NVIDIA H200" in lines


@pytest.mark.parametrize(
    ("nvml", "line"),
    [
        (two_t4s(), "ok   GPU         2 × Tesla T4"),
        (two_t4s(), "warn VRAM        GPU 0: 6 of 15 GiB free"),
        (shared_gpu(), "warn sharing"),
        (throttled_gpu(after_s=-1.0), "warn throttling  GPU 0: thermal (600 of 1590 MHz)"),
        (throttled_gpu(after_s=-1.0), "fail temperature GPU 0: 94 °C, slows down at 93 °C"),
        (no_driver(), "warn GPU         none: no NVIDIA driver"),
    ],
)
def test_each_machine_is_told_as_it_is(
    nvml: FakeNvml, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, nvml)
    assert line in check(capsys)


def test_a_gpu_that_is_lost_on_the_way_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = FakeClock()
    use(monkeypatch, lost_gpu(clock, after_s=10.0))
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.advance(20.0))
    assert "fail GPU         GPU 1 (Tesla T4) no longer answers" in check(capsys)


def test_json_is_one_object_with_stable_keys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], data: Path
) -> None:
    use(monkeypatch, two_t4s())
    answer = json.loads(check(capsys, "--json", "--data", str(data)))
    assert list(answer) == ["schema_version", "machine", "storage", "preflight"]
    assert answer["schema_version"] == 1
    assert list(answer["machine"]) == [
        *("hostname", "platform", "python", "torch", "cuda", "driver", "cpu", "mem_total_bytes", "mem_limit_bytes"),
        *("shm_total_bytes", "shm_free_bytes", "gpus", "driver_cuda", "why_no_gpu"),
    ]
    assert list(answer["preflight"][0]) == ["name", "state", "figure", "remedy"]
    assert [gpu["util_pct"] for gpu in answer["machine"]["gpus"]] == [85.0, 0.0]
    assert answer["machine"]["gpus"][0]["sm_active_pct"] is None
    assert answer["storage"]["files"] == 20
    assert answer["storage"]["total_bytes"] == 400_000
    decode(Machine, answer["machine"])
    decode(StorageReading, answer["storage"])
    assert [decode(CheckLine, line).name for line in answer["preflight"]][-2:] == ["data", "RAM disk"]


def test_json_without_data_says_null(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use(monkeypatch, no_driver())
    answer = json.loads(check(capsys, "--json"))
    assert answer["storage"] is None
    assert answer["machine"]["gpus"] == []
    assert "driver" in answer["machine"]["why_no_gpu"]


def test_the_plan_reaches_the_preflight(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use(monkeypatch, no_driver())
    flags = ("--workers", "4096", "--prefetch", "4", "--batch-bytes", "1GiB")
    lines = {line["name"]: line for line in json.loads(check(capsys, "--json", *flags))["preflight"]}
    assert lines["/dev/shm"]["state"] in ("fail", "skip")
    if lines["/dev/shm"]["state"] == "fail":
        assert "16 TiB needed: 4,096 workers × 4 × 1 GiB" in lines["/dev/shm"]["figure"]
    assert "4096 workers asked for" in lines["CPUs"]["figure"]


def test_torch_is_not_imported() -> None:
    script = "import sys; from fulltilt.cli.main import main\ntry: main(['check'])\nexcept SystemExit: pass\n"
    script += "sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


def test_an_ascii_terminal_is_no_reason_to_fail() -> None:
    environ = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "fulltilt", "check"]
    shown = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert "preflight" in shown.stdout
    assert shown.stderr == ""


# --------------------------------------------------------------------------- bad usage


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--no-such-flag"], "No such option: --no-such-flag"),
        (["extra"], "unexpected extra argument"),
        (["--data"], "'--data' requires an argument"),
        (["--data", "{tmp}/nowhere"], "the data folder {tmp}/nowhere does not exist"),
        (["--data", "{tmp}/file"], "{tmp}/file is a file"),
        (["--workers", "many"], "Invalid value for '--workers'"),
        (["--workers", "-1"], "Invalid value for '--workers'"),
        (["--prefetch", "0"], "Invalid value for '--prefetch'"),
        (["--batch-bytes", "12 parsecs"], "--batch-bytes '12 parsecs' is not a size"),
        (["--batch-bytes", "0"], "--batch-bytes '0' is not a size"),
    ],
)
def test_bad_usage_is_one_or_two_lines_and_exit_2(
    flags: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as ended:
        main(["check", *(flag.format(tmp=tmp_path) for flag in flags)])
    shown = capsys.readouterr()
    assert ended.value.code == 2
    assert shown.out == ""
    assert len(shown.err.splitlines()) <= 2
    assert shown.err.startswith("fulltilt: ")
    assert complaint.format(tmp=tmp_path) in shown.err


def test_a_full_disk_under_the_output_is_the_machines_fault() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    with open("/dev/full", "w") as full:  # noqa: PTH123 - a device
        ended = subprocess.run(
            [sys.executable, "-m", "fulltilt", "check"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (ended.returncode, ended.stderr) == (7, "fulltilt: cannot write: No space left on device\n")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("64MB", 64_000_000),
        ("64 MiB", 64 * 1024**2),
        ("1.5gb", 1_500_000_000),
        ("512KiB", 512 * 1024),
        ("2k", 2000),
        ("1000000", 1_000_000),
        ("38535168b", 38_535_168),
    ],
)
def test_sizes_are_read_with_their_units(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@given(st.text(max_size=12))
@pytest.mark.slow
def test_any_text_is_a_size_or_a_usage_error(text: str) -> None:
    try:
        assert parse_bytes(text) > 0
    except UsageError:
        pass


# --------------------------------------------------------------------------- the guide's own script


def guide(*flags: str, code: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/check_gpu_utilization.py", *flags]
    if code:
        command = [sys.executable, "-c", code, *flags]
    return subprocess.run(command, cwd=ROOT / "guides", capture_output=True, text=True, check=False)


def test_the_guides_script_runs_as_written_and_checks_the_machine() -> None:
    shown = guide()
    assert shown.returncode == 0, shown.stderr
    assert "preflight" in shown.stdout


@pytest.mark.slow
def test_the_guides_script_prints_the_memory_line_of_the_guide() -> None:
    code = (
        "import runpy\n"
        "from fulltilt.probes.gpu import Gpus\nfrom fulltilt.testing import two_t4s\n"
        "real, nvml = Gpus.open, two_t4s()\n"
        "Gpus.open = classmethod(lambda cls, **more: real(nvml, **more))\n"
        "runpy.run_path('scripts/check_gpu_utilization.py', run_name='__main__')"
    )
    shown = guide(code=code)
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert "GPU 0: Tesla T4" in lines
    assert "GPU Memory - Allocated: 9.00 GB, Peak: 9.00 GB" in lines
    assert "ok   GPU         2 × Tesla T4" in lines


@pytest.mark.slow
def test_the_guides_script_passes_its_flags_on() -> None:
    assert list(json.loads(guide("--json").stdout)) == ["schema_version", "machine", "storage", "preflight"]
    bad = guide("--data", "/no/such/folder")
    assert (bad.returncode, bad.stderr) == (2, "fulltilt: the data folder /no/such/folder does not exist\n")
