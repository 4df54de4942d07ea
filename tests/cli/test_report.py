"""`fulltilt report`: terminal, page and JSON from run folders."""

import json
import os
import random
import re
from pathlib import Path

import pytest

from fulltilt.cli import main as cli
from tests.report import examples


@pytest.fixture
def report(monkeypatch, tmp_path, capfd):
    """Runs the verb in an empty folder: its exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(cli, "COMMANDS", ("report",))

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit:
            cli.main(["report", *arguments])
        out, err = capfd.readouterr()
        return int(exit.value.code or 0), out, err

    return run


def folder(name: str, path: str | None = None) -> str:
    return str(examples.write_folder(Path(path or name), getattr(examples, name)()[0]))


def test_one_run_is_shown_and_gets_its_page(report):
    code, out, err = report(folder("starved"))
    assert (code, err) == (0, "")
    assert "Where the time went" in out
    assert "One step, to scale" in out
    assert "\x1b" not in out
    assert out.endswith(f"\npage: {Path('starved/report.html')}\n")
    assert "What to change" in Path("starved/report.html").read_text(encoding="utf-8")


def test_json_is_one_object_and_nothing_else(report):
    code, out, err = report(folder("starved"), "--json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert answer["verdict"]["code"] == "input_cpu_bound"
    assert answer["run"]["state"] == "done"
    assert sum(answer["ledger"]["buckets"].values()) == pytest.approx(answer["ledger"]["wall_s"])
    assert not Path("starved/report.html").exists()


def test_json_of_several_runs_is_a_list_in_order(report):
    _, out, _ = report(folder("healthy"), folder("starved"), folder("crashed"), "--json")
    assert [answer["run"]["folder"] for answer in json.loads(out)] == ["healthy", "starved", "crashed"]


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "1e308"])
@pytest.mark.parametrize("name", ["starved", "healthy"])
def test_a_run_with_figures_that_are_not_finite_is_shown(report, name, number):
    path = Path(folder(name))
    dice = random.Random(number)
    for file in (*path.glob("*.jsonl"), *path.glob("*.json")):
        # Figures that may be missing; without the others there is no span or sample, which is a damaged line.
        needed = "t0_s|t1_s|t_s|fetch|idle_s|process_cpu|blocked|seconds|step_s|usable|busy_s|copies_s"
        figures = rf'("(?!{needed})[a-z_]*_(?:s|pct|w|c)": ?)[0-9.e-]+'
        text = re.sub(figures, lambda it: f"{it[1]}{number}" if dice.random() < 0.3 else it[0], file.read_text())
        file.write_text(text)
    code, out, err = report(str(path))
    assert (code, err) == (0, "")
    assert not re.search(r"\b(nan|inf)\b", out, re.IGNORECASE)
    code, out, _ = report(str(path), "--json")
    assert code == 0
    json.loads(out, parse_constant=pytest.fail)


def test_several_runs_get_a_comparison_page_here(report):
    code, out, _ = report(folder("starved"), folder("healthy"))
    assert code == 0
    assert "2 runs side by side" in out
    assert "relative speed, after start-up" in out
    assert "2 runs side by side" in Path("fulltilt-report.html").read_text(encoding="utf-8")
    assert not Path("starved/report.html").exists()


def test_the_page_goes_where_it_is_told(report):
    report(folder("starved"), "--html", "page.html")
    assert Path("page.html").exists()
    assert not Path("starved/report.html").exists()
    code, out, _ = report("starved", "--json", "--html", "second.html")
    assert (code, json.loads(out)["schema_version"]) == (0, 1)
    assert Path("second.html").exists()


def test_the_page_is_there_also_when_nobody_reads_on(report, monkeypatch):
    def pipe_is_closed(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("fulltilt.report.terminal.show", pipe_is_closed)
    report(folder("starved"))
    assert Path("starved/report.html").exists()


def test_no_page(report):
    code, out, _ = report(folder("starved"), "--no-page")
    assert (code, "page:" in out) == (0, False)
    assert not Path("starved/report.html").exists()


def test_the_width_can_be_set(report):
    _, out, _ = report(folder("starved"), "--width", "120", "--no-page")
    assert max(map(len, out.splitlines())) == 120


def test_a_running_job_is_reported_as_far_as_it_is(report):
    path = folder("running")
    code, out, _ = report(path)
    assert code == 0
    assert "no end yet" in " ".join(out.split())
    assert json.loads(report(path, "--json")[1])["run"]["state"] == "running"


def test_without_an_argument_the_newest_run_is_taken(report):
    for name, age_s in (("starved", 100), ("crashed", 10), ("healthy", 50)):
        path = Path(folder(name, f"fulltilt-runs/{name}")) / "run.json"
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - age_s))
    code, out, _ = report("--json")
    assert code == 0
    assert json.loads(out)["run"]["name"] == "broken"


def test_the_demos_runs_are_found_without_an_argument(report):
    """The first that a user does after `make demo`."""
    folder("crashed", "fulltilt-runs/demo/2-tuned")
    code, out, err = report("--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["run"]["name"] == "broken"


@pytest.mark.parametrize("state", ["missing", "empty", "file"])
def test_what_is_no_run_folder_is_told_in_two_lines_and_bad_usage(report, state):
    path = Path("nothing")
    if state == "empty":
        path.mkdir()
    if state == "file":
        path.write_text("x")
    for extra in ([], ["--json"]):
        code, out, err = report("nothing", *extra)
        assert (code, out) == (2, "")
        assert err.startswith("fulltilt: nothing is not a run folder")
        assert err.count("\n") <= 2


def test_a_damaged_run_names_the_file_and_exits_7(report):
    folder("starved")
    Path("starved/run.json").write_text('{"name": ')
    code, out, err = report("starved")
    assert (code, out) == (7, "")
    assert "run.json" in err


def test_no_run_at_all_exits_2_and_says_what_to_give(report):
    code, out, err = report()
    assert (code, out) == (2, "")
    assert f"none in {Path.cwd()}/fulltilt-runs" in err, "the place that was looked in"
    assert "--out named" in err
    assert "fulltilt report RUN" in err
    assert max(map(len, err.splitlines()[1:])) < 80


@pytest.mark.parametrize("arguments", [["--html", "a.html", "--no-page"], ["--width", "3"], ["--nonsense"]])
def test_wrong_usage_exits_2_without_a_traceback(report, arguments):
    code, out, err = report(folder("starved"), *arguments)
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    assert err.count("\n") <= 2


def test_a_page_that_cannot_be_written_is_an_error_only_when_asked_for(report):
    path = folder("starved")
    Path("starved/report.html").mkdir()
    code, out, err = report(path)
    assert code == 0
    assert "Where the time went" in out
    assert err.startswith("fulltilt: no page: ")
    assert "report.html was not written by Fulltilt" in err
    code, _, err = report(path, "--html", "nowhere/page.html")
    assert code == 7
    assert err.startswith("fulltilt: cannot write")


def test_names_from_the_folder_are_shown_as_text(report):
    code, out, _ = report(folder("hostile", "hostile"))
    assert code == 0
    assert "\x1b" not in out
    assert examples.HOSTILE not in Path("hostile/report.html").read_text(encoding="utf-8")
