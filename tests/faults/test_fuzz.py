"""Hostile files: thousands of structure-aware mutations each end in an answer or in one clear error.

No traceback, no code that runs, nothing written. `FUZZ_MUTATIONS` says how many; the long suite has 10,000 of each.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fulltilt import store
from fulltilt.diagnosis import answer
from fulltilt.errors import FulltiltError
from fulltilt.report import page, terminal
from fulltilt.report.answer import to_plain

MUTATIONS = int(os.environ.get("FUZZ_MUTATIONS", "10000"))
QUICK = 60
HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**400, -(10**30), 0.5, 1e-320, 1e308, -1e308),
    *(
        float("nan"),
        float("inf"),
        float("-inf"),
        "",
        "x",
        "\x1b[31m\x1b]0;t\x07",
        "<script>alert(1)</script>",
        "\ud800",
    ),
    *(
        "../../etc/passwd",
        "/dev/zero",
        "[bold red]x[/]",
        "a" * 5000,
        "\ud800",
        "\x00",
        "Tʜé\u202eevil",
        [],
        {},
        [[]],
        [None],
    ),
    {"__reduce__": ["os.system", ["touch /tmp/fulltilt-owned"]]},
)


def hostile(rng: random.Random) -> Any:
    if rng.random() < 0.03:
        deep: Any = 1
        for _ in range(rng.choice((10, 200, 3000))):
            deep = [deep] if rng.random() < 0.5 else {"a": deep}
        return deep
    return rng.choice(HOSTILE)


def spots(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += spots(inner, (*path, key))
    return found


def mutate_json(text: str, rng: random.Random) -> str:
    """The text with one to three values exchanged, dropped, doubled or moved."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    places = spots(value)
    for path in rng.sample(places, min(len(places), rng.randint(1, 3))):
        if not path:
            if rng.random() < 0.1:
                value = hostile(rng)
            continue
        try:
            parent = value
            for key in path[:-1]:
                parent = parent[key]
            parent[path[-1]]
        except (TypeError, LookupError):
            continue  # it went with the change before
        action = rng.random()
        if action < 0.7:
            parent[path[-1]] = hostile(rng)
        elif action < 0.85 or isinstance(parent, dict):
            del parent[path[-1]]
        else:
            parent.insert(path[-1], parent[path[-1]])
    try:
        return json.dumps(value)
    except (ValueError, RecursionError):
        return "[" * 5000


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """The bytes with some flipped, cut off, doubled or put in."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) + 1)
        action = rng.random()
        if action < 0.4 and at < len(changed):
            changed[at] = rng.randrange(256)
        elif action < 0.6:
            del changed[at : at + rng.randint(1, 40)]
        elif action < 0.8:
            changed[at:at] = rng.randbytes(rng.randint(1, 8))
        else:
            del changed[at:]
    return bytes(changed)


def mutate_file(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    if rng.random() < 0.75:
        lines = data.decode("utf-8", "replace").splitlines()
        if path.suffix == ".jsonl" and lines:
            at = rng.randrange(len(lines))
            action = rng.random()
            if action < 0.8:
                lines[at] = mutate_json(lines[at], rng)
            elif action < 0.9:
                lines.insert(at, lines[at])
            else:
                rng.shuffle(lines)
            data = ("\n".join(lines) + "\n").encode("utf-8", "replace")
        elif path.suffix == ".json":
            data = mutate_json(data.decode("utf-8", "replace"), rng).encode("utf-8", "replace")
    else:
        data = mutate_bytes(data, rng)
    path.write_bytes(data)


def fuzz(source: Path, scratch: Path, count: int, read: Callable[[Path], None]) -> dict[str, int]:
    """Read ``count`` mutated copies of a folder; how many were read and how many refused."""
    counts = {"read": 0, "refused": 0}
    files = sorted(path.relative_to(source) for path in source.rglob("*") if path.is_file())
    for seed in range(count):
        rng = random.Random(seed)
        folder = scratch / "mutated"
        shutil.copytree(source, folder)
        for name in rng.sample(files, min(len(files), rng.choice((1, 1, 1, 2)))):
            mutate_file(folder / name, rng)
        before = {path: path.read_bytes() for path in scratch.rglob("*") if path.is_file()}
        try:
            read(folder)
            counts["read"] += 1
        except FulltiltError:
            counts["refused"] += 1
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        after = {path: path.read_bytes() for path in scratch.rglob("*") if path.is_file()}
        assert before == after, f"seed {seed}"
        shutil.rmtree(folder)
    assert not Path("/tmp/fulltilt-owned").exists()
    assert counts["read"] > count / 10
    return counts


JOB = """
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for (batch,) in DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8, num_workers=1):
        model(batch).sum().backward()
        optimizer.step()
"""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fuzz")
    (root / "job.py").write_text(JOB)
    command = [sys.executable, "-m", "fulltilt", "run", "--out", "run", "job.py"]
    subprocess.run(command, cwd=root, check=True, capture_output=True, timeout=150)
    for name in (".fulltilt", "report.html", "findings.json", ".claim-0"):
        (root / "run" / name).unlink(missing_ok=True)
    return root / "run"


def show_run(folder: Path) -> None:
    run = store.load(folder)
    diagnosis = answer(run)
    json.dumps(to_plain(diagnosis, run), allow_nan=False)
    html = page.render([(run, diagnosis)])
    assert "<script>alert" not in html
    output = io.StringIO()
    terminal.show(Console(file=output, width=80), [(run, diagnosis)])
    assert "\x1b]0;" not in output.getvalue()


@pytest.mark.parametrize("count", [QUICK, pytest.param(MUTATIONS, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_hostile_run_folders_are_shown_or_refused(run_folder: Path, tmp_path: Path, count: int) -> None:
    print(fuzz(run_folder, tmp_path, count, show_run))
