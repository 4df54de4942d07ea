"""What others rely on: exported names, flags, exit codes, finding codes, import time, and the floors of the house."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

import fulltilt
from fulltilt import errors, records
from fulltilt.cli import check
from fulltilt.cli import main as command

ROOT = Path(__file__).parents[1]


# --------------------------------------------------------------------------- names


def test_the_exported_names_are_these_and_all_are_there() -> None:
    assert fulltilt.__all__ == ["__version__", "diagnose", "feed", "load", "record"]
    assert dir(fulltilt) == sorted(fulltilt.__all__)
    for name in fulltilt.__all__:
        assert getattr(fulltilt, name) is not None


def test_a_name_that_is_not_exported_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        fulltilt.nothing  # noqa: B018


def test_the_version_stands_in_one_place_and_in_the_changelog() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{fulltilt.__version__}"' in project
    assert f"## [{fulltilt.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_finding_codes_are_these() -> None:
    assert get_args(records.FindingCode) == (
        *("input_serial", "input_cpu_bound", "slow_storage", "input_io_bound", "input_handover", "epoch_restart"),
        *("dataset_pickled", "transfer_blocking"),
        *(
            "sync_point",
            "launch_bound",
            "batch_too_small",
            "precision_unused",
            "free_switches",
            "padding_waste",
            "slowing_down",
            "host_code",
            "recompiling",
            "gc_pauses",
        ),
        *("validation_heavy", "checkpoint_stall", "memory_pressure"),
        *("worker_memory_growth", "cpu_affinity", "launch_contended", "gil_contended", "cpu_oversubscribed"),
        *("shm_small", "throttled"),
        *("gpu_shared", "straggler", "communication_bound", "find_unused_parameters", "compute_bound"),
    )


# --------------------------------------------------------------------------- exit codes and errors


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UsageError, 2),
        (errors.StoppedEarly, 3),
        (errors.DataError, 4),
        (errors.DoesNotFit, 5),
        (errors.Diverged, 6),
        (errors.MachineError, 7),
        (errors.RunFolderError, 7),
        (errors.NotARunFolder, 2),
        (errors.ForeignFiles, 2),
    ],
)
def test_every_error_ends_the_command_with_its_code_and_its_remedy(
    error: type[errors.FulltiltError], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise error("it broke", "Mend it.")

    monkeypatch.setattr(check, "_read_machine", fail)
    with pytest.raises(SystemExit) as ended:
        command.main(["check"])
    assert ended.value.code == code
    assert capsys.readouterr().err == "fulltilt: it broke\n  Mend it.\n"


def test_no_error_is_left_out_above() -> None:
    known = {errors.FulltiltError}
    todo = [errors.FulltiltError]
    while todo:
        todo = [child for parent in todo for child in parent.__subclasses__() if child.__module__ == errors.__name__]
        known.update(todo)
    assert {kind.__name__ for kind in known} == {
        *("FulltiltError", "UsageError", "StoppedEarly", "DataError", "DoesNotFit", "Diverged", "MachineError"),
        *("RunFolderError", "NotARunFolder", "ForeignFiles"),
    }


@pytest.mark.parametrize("arguments", [["--no-such-flag"], ["no-such-verb"], ["check", "--no-such-flag"]])
def test_bad_usage_ends_with_2_and_at_most_two_lines(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    shown = capsys.readouterr()
    assert (ended.value.code, shown.out) == (2, "")
    assert shown.err.startswith("fulltilt: No such ")
    assert len(shown.err.splitlines()) <= 2


def test_without_a_verb_it_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("Usage: fulltilt ")


def test_a_verb_with_its_output_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """``fulltilt … >&-``: Python has None in the place of both streams."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    with pytest.raises(SystemExit) as ending:
        command.main(["--version"])
    assert ending.value.code == 0


# --------------------------------------------------------------------------- flags

FLAGS = {
    "demo": {"--out", "--help"},
    "check": {"--data", "--workers", "--prefetch", "--batch-bytes", "--json", "--help"},
    "watch": {"--interval", "--once", "--out", "--help"},
    "run": {"--out", "--deep", "--settings", "--auto", "--exact", "-m", "--help"},
    "tune": {"--budget", "--allow", "--apply", "--out", "--trial-limit", "--in-place", "-m", "--help"},
    "plan": {"--target", "--gpu", "--json", "--help"},
    "train": {"--help"},  # the rest depends on the recipe: tests/recipes/test_options.py
    "report": {"--json", "--html", "--no-page", "--width", "--help"},
    "make-data": {"--size", "--seed", "--help"},
    "cache": {"--dir", "--name", "--json", "--help"},
}


def flags_of(verb: str) -> set[str]:
    app = typer.Typer()
    command.add_command(app, verb)
    app.command("another")(lambda: None)  # a single command would be the app itself
    verb_command = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
    options = [flag for parameter in verb_command.params for flag in (*parameter.opts, *parameter.secondary_opts)]
    return {flag for flag in options if flag.startswith("-")} | {"--help"}


def test_the_verbs_are_these() -> None:
    assert set(command.COMMANDS) == set(FLAGS)


@pytest.mark.parametrize("verb", sorted(FLAGS))
def test_the_flags_are_these(verb: str) -> None:
    assert flags_of(verb) == FLAGS[verb]


# --------------------------------------------------------------------------- import


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True, cwd="/")


@pytest.mark.parametrize("module", ["torch", "numpy", "psutil", "rich", "typer", "pynvml"])
def test_importing_fulltilt_imports_nothing_heavy(module: str) -> None:
    run_python("-c", f"import sys, fulltilt; sys.exit({module!r} in sys.modules)")


@pytest.mark.parametrize("room", ["diagnosis", "report", "probes", "store", "cli.main"])
def test_rooms_that_need_no_torch_do_not_import_it(room: str) -> None:
    run_python("-c", f"import sys, fulltilt.{room}; sys.exit('torch' in sys.modules)")


@pytest.mark.quiet
def test_importing_fulltilt_takes_under_a_fifth_of_a_second() -> None:
    times_s = []
    for _ in range(3):
        said = run_python("-X", "importtime", "-c", "import fulltilt").stderr
        line = next(line for line in said.splitlines() if re.search(r"\| fulltilt$", line))
        times_s.append(int(line.split("|")[1]) / 1e6)
    assert min(times_s) < 0.2, times_s


# --------------------------------------------------------------------------- floors


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package in which imports may be spoilt."""
    folder = tmp_path_factory.mktemp("house")
    shutil.copytree(ROOT / "src/fulltilt", folder / "fulltilt", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    script = Path(sys.executable).with_name("lint-imports")
    return subprocess.run([script, "--no-cache"], cwd=folder, capture_output=True, text=True, check=False)


def test_imports_go_downward_only(house: Path) -> None:
    linted = lint_imports(house)
    assert linted.returncode == 0, linted.stdout + linted.stderr


@pytest.mark.parametrize(
    ("file", "spoilt", "complaint"),
    [
        ("records/run.py", "import fulltilt.store", "fulltilt.records is not allowed to import fulltilt.store"),
        (
            "diagnosis/loader_bottleneck.py",
            "import fulltilt.report",
            "fulltilt.diagnosis is not allowed to import fulltilt.report",
        ),
        ("probes/host.py", "from fulltilt.cli import main", "fulltilt.probes is not allowed to import fulltilt.cli"),
        ("report/status_line.py", "import torch", "fulltilt.report is not allowed to import torch"),
        ("recorder/marks.py", "import fulltilt.recorder.intervals", "No cycles are allowed in fulltilt.recorder"),
    ],
)
def test_an_upward_import_breaks_the_build(house: Path, file: str, spoilt: str, complaint: str) -> None:
    path = house / "fulltilt" / file
    good = path.read_text()
    try:
        path.write_text(f"{good}\n{spoilt}\n")
        linted = lint_imports(house)
    finally:
        path.write_text(good)
    assert linted.returncode == 1
    assert complaint in linted.stdout
