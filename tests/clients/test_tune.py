"""`fulltilt tune --apply` on jobs of other libraries: their own keyword, in the call that the user wrote.

`make test-clients` installs the libraries and runs this. A study takes about a minute on a quiet machine.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clients.test_clients import JOBS, LONGEST_S

BUDGET_S = 2 * LONGEST_S
pytestmark = [pytest.mark.slow, pytest.mark.timeout(BUDGET_S + 2 * LONGEST_S)]


@dataclass(frozen=True)
class Edit:
    """The line of a job that should change, and what it should read afterwards."""

    script: str
    library: str
    before: str
    after: str


EDITS = (
    Edit(
        "transformers_trainer",
        "transformers",
        "    disable_tqdm=True,",
        "    disable_tqdm=True, dataloader_num_workers={}, dataloader_persistent_workers=True,",
    ),
    Edit(
        "lightning_fit",
        "lightning",
        "train_loader = DataLoader(SlowRows(SAMPLES), batch_size=8, shuffle=True)",
        "train_loader = DataLoader(SlowRows(SAMPLES), batch_size=8, shuffle=True,"
        " num_workers={}, persistent_workers=True)",
    ),
    Edit("skorch_fit", "skorch", "    verbose=0,", "    verbose=0, iterator_train__num_workers={},"),
    Edit(
        "fastai_learner",
        "fastai",
        'bs=8, num_workers=0, device="cpu")',
        'bs=8, num_workers={}, device="cpu")',
    ),
    Edit(
        "accelerate_loop",
        "accelerate",
        "loader = DataLoader(SlowRows(SAMPLES), batch_size=8, shuffle=True)",
        "loader = DataLoader(SlowRows(SAMPLES), batch_size=8, shuffle=True, num_workers={}, persistent_workers=True)",
    ),
    Edit(
        "timm_loader",
        "timm",
        "num_workers=0, persistent_workers=False,",
        "num_workers={}, persistent_workers=True,",
    ),
    Edit("ultralytics_detect", "ultralytics", "    workers=0,", "    workers={},"),
)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.script)
def test_tune_writes_the_librarys_keyword_into_the_users_call(edit: Edit, tmp_path: Path) -> None:
    if importlib.util.find_spec(edit.library) is None:
        pytest.skip(f"{edit.library} is not installed (make test-clients)")
    job = tmp_path / "job"
    job.mkdir()
    for name in (f"{edit.script}.py", "slow_data.py"):
        (job / name).write_bytes((JOBS / name).read_bytes())
    before = contents(job)

    def python(*arguments: str, limit_s: float, **environment: str) -> str:
        ended = subprocess.run(
            [sys.executable, *arguments],
            cwd=job,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    tune = ("-m", "fulltilt", "tune", "--budget", f"{BUDGET_S}s", "--apply", "--out", str(tmp_path / "study"))
    printed = python(*tune, f"{edit.script}.py", limit_s=BUDGET_S + LONGEST_S, EPOCHS="20", READ_S="0.02")
    after = contents(job)
    script = job / f"{edit.script}.py"
    # A longer queue may have won, too.
    source = re.sub(r", \w*prefetch_factor=[48]\b", "", after.pop(script).decode())
    was = before.pop(script).decode()
    assert after == before, "another file was changed"
    wanted = re.escape(was.replace(edit.before, edit.after, 1)).replace(r"\{\}", r"[1-9]\d?")
    assert was.count(edit.before) == 1
    assert re.fullmatch(wanted, source), printed
    counted = python(script.name, limit_s=LONGEST_S).partition("COUNTED ")[2]
    assert json.loads(counted)["steps"] > 0
