"""The slow rank of a job over two hosts is named with its cause; where none is slow, none is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from fulltilt import store
from fulltilt.diagnosis import answer
from fulltilt.records import Finding
from tests.faults.slow_rank import KINDS, RANKS, run_job

CAUSES = {"cpu": "code of the script's own", "sleep": "code of the script's own", "data": "waiting for data"}
SLOW_RUNS, HEALTHY_RUNS, UNEVEN_RUNS = 40, 20, 5
ALL_KINDS = [*Random(7).choices(KINDS, k=SLOW_RUNS), *["none"] * HEALTHY_RUNS, *["uneven"] * UNEVEN_RUNS]


def stragglers(out: Path) -> list[Finding]:
    return [finding for finding in answer(store.load(out)).findings if finding.code == "straggler"]


def named(out: Path, kind: str, slow: int) -> bool:
    found = stragglers(out)
    who = f"rank {slow} on host{slow // 2} "
    return len(found) == 1 and who in found[0].evidence[0] and CAUSES[kind] in found[0].evidence[2]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_slow_rank_is_named_and_no_other(tmp_path: Path) -> None:
    """Forked from a process of their own: pytest's has threads."""
    command = [sys.executable, "-m", "tests.faults.test_slow_rank", str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = [line.split() for line in done.stdout.splitlines() if line.startswith("run ")]
    right = {kind: sum(line[-1] == "right" for line in told if line[2] == kind) for kind in {*ALL_KINDS}}
    assert sum(right[kind] for kind in KINDS) >= SLOW_RUNS - 2, done.stdout
    assert right["none"] == HEALTHY_RUNS, done.stdout
    assert right["uneven"] >= UNEVEN_RUNS - 1, done.stdout


def main(out: Path) -> None:
    choose = Random(11)
    for number, kind in enumerate(ALL_KINDS):
        slow = choose.randrange(RANKS)
        folder = out / f"{number}-{kind}-{slow}"
        run_job(folder, kind, slow if kind in KINDS else None)
        found = stragglers(folder)
        if kind in KINDS:
            right = named(folder, kind, slow)
        elif kind == "uneven":
            right = len(found) == 1 and "now this, now that" in found[0].evidence[0]
        else:
            right = not found
        told = [repr(finding.evidence) for finding in found]
        print("run", number, kind, slow, *told, "right" if right else "wrong", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
