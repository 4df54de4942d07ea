"""Every command and every Python block in the documents is one that this Fulltilt takes."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

from fulltilt.cli.main import COMMANDS, add_command, main
from fulltilt.cli.train import command_of
from fulltilt.recipes import find
from fulltilt.records import FindingCode

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`(fulltilt [^`\n]+)`(?!`)")
# What a reader is to put in is written like this: DIR, NAME, RUN [RUN ...], list|clear, …
PLACEHOLDER = re.compile(r"…|\[|\||\b[A-Z]{3,}\b")


@cache
def command(verb: str) -> Any:
    """The parser of a verb, as `fulltilt VERB` has it."""
    own = typer.Typer(pretty_exceptions_enable=False)
    add_command(own, verb)
    own.command("another")(lambda: None)  # a single command would be the app itself
    return typer.main.get_command(own).commands[verb]  # type: ignore[attr-defined]


def parse(line: str) -> None:
    """Have the real command line parse a documented one. Raises what the user would be told."""
    words = shlex.split(line.partition(" # ")[0], posix=True)
    for index, word in enumerate(words):
        if re.fullmatch(r"[|;&<>]+|\d?>\S*", word):
            words = words[:index]
            break
    verb, *rest = words[1:] or ["--help"]
    if verb.startswith("-"):
        assert verb in ("--help", "-h", "--version", "--install-completion", "--show-completion"), f"no flag {verb}"
        return
    assert verb in COMMANDS, f"no command {verb}"
    if verb == "train" and rest and not rest[0].startswith("-"):
        recipe = typer.Typer(pretty_exceptions_enable=False)
        recipe.command()(command_of(find(rest[0])))
        typer.main.get_command(recipe).make_context("train", rest[1:], resilient_parsing="--help" in rest)
    else:
        command(verb).make_context(verb, rest, resilient_parsing="--help" in rest)


def commands_in(text: str) -> list[str]:
    """The lines of shell blocks that call fulltilt, and the commands in running text that name a flag."""
    blocks = [body for _, language, body in FENCE.findall(text) if language in ("", "sh", "bash", "console", "yaml")]
    lines = [line for body in blocks for line in body.replace("\\\n", " ").splitlines()]
    called = [re.search(r"(?:^|[$;&|(] ?|srun [^|;&]*|run: |-q +)(fulltilt( .*)?)$", line.strip()) for line in lines]
    running = [found for found in INLINE.findall(FENCE.sub("", text)) if not PLACEHOLDER.search(found)]
    return [found[1] for found in called if found] + [line for line in running if " -" in line]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_documented_commands_are_taken_by_the_command_line(page: Path) -> None:
    for line in commands_in(page.read_text(encoding="utf-8")):
        try:
            parse(line)
        except Exception as error:
            told = error.format_message() if hasattr(error, "format_message") else repr(error)
            pytest.fail(f"{page.name}: {line}: {told}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_compile(page: Path) -> None:
    for _, language, body in FENCE.findall(page.read_text(encoding="utf-8")):
        if language in ("python", "py"):
            ast.parse(body, str(page))


def test_a_wrong_flag_or_verb_is_found() -> None:
    text = "```sh\nfulltilt run --auot train.py\n$ fulltilt report a --json | jq .\nfulltilt tuen x  # why\n```\n"
    wrong, right, verb = commands_in(text)
    parse(right)
    with pytest.raises(Exception, match="auot"):
        parse(wrong)
    with pytest.raises(AssertionError, match="tuen"):
        parse(verb)
    with pytest.raises(Exception, match="backbonne"):
        parse("fulltilt train cod --backbonne x")
    assert commands_in("see `fulltilt report --jsno` and `fulltilt report RUN --x`") == ["fulltilt report --jsno"]


@pytest.mark.parametrize("verb", ["", *COMMANDS])
def test_help_has_examples_that_work_and_fits_80_columns(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*([verb] if verb else []), "--help"])
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= 80
    assert not [line for line in shown if line.endswith("...") and not line.startswith(("Usage", "   "))]
    below = shown[shown.index(next(line for line in shown if line.strip() == "Examples:")) + 1 :]
    assert below
    for line in below:
        parse(line.strip())


# --------------------------------------------------------------------------- the finding codes

ON_GPU = {"transfer_blocking", "sync_point", "launch_bound", "batch_too_small", "precision_unused"}
ON_GPU |= {"free_switches", "launch_contended"}
# What ten harmless lines cannot show.
ELSEWHERE = {"shm_small", "throttled", "gpu_shared", "memory_pressure"}


def scripts() -> dict[str, str]:
    """The script of each finding code that has one."""
    text = (ROOT / "docs/findings.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL))
    return {name: found[3] if (found := FENCE.search(body)) else "" for name, body in sections.items()}


def test_every_finding_code_is_explained() -> None:
    assert set(scripts()) == set(get_args(FindingCode))
    assert all(text for code, text in scripts().items() if code not in ELSEWHERE)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "code",
    [
        pytest.param(code, marks=[pytest.mark.gpu] if code in ON_GPU else [])
        for code in sorted(set(get_args(FindingCode)) - ELSEWHERE)
    ],
)
def test_the_script_of_a_finding_shows_it(code: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(scripts()[code])
    ranks = [] if "init_process_group" not in scripts()[code] else ["--", "torchrun", "--nproc-per-node", "2"]
    command = [sys.executable, "-m", "fulltilt", "run", "--out", "run", *ranks, "script.py"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True) as job:
        try:
            told = job.communicate(timeout=500)[1]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)  # nothing of it stays behind
    assert job.returncode == 0, told
    findings = json.loads((tmp_path / "run" / "findings.json").read_text())["findings"]
    assert code in [finding["code"] for finding in findings], told


def test_the_published_schema_is_that_of_the_code() -> None:
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "docs/make_reference.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    published = json.loads((ROOT / "docs/report.schema.json").read_text(encoding="utf-8"))
    assert published == made.schema(), "make it anew: python docs/make_reference.py"
    assert "--budget" in made.reference()
    assert "cache_key" in made.api()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_that_are_there(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    links = re.findall(r"\]\(([^)#\s]+)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    generated = ROOT / "docs/reference.md"
    for link in links:
        target = (page.parent / link).resolve()
        assert "://" in link or target.exists() or target == generated, f"{page.name} leads to {link}"
