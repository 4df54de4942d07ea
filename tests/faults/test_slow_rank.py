"""The slow rank of a job over two hosts is named with its cause; where none is slow, none is named."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from fulltilt import store
from fulltilt.diagnosis import answer
from fulltilt.errors import FulltiltError
from fulltilt.records import Finding, RankRecord, Run
from tests.faults.slow_rank import KINDS, RANKS, STOPS_AT, run_job

CAUSES = {"cpu": "the script's own code", "sleep": "the script's own code", "data": "waiting for data"}
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


def _stands_at(rank: RankRecord, line: str) -> bool:
    stays = rank.under_way is not None and rank.under_way.first_step >= STOPS_AT
    return stays and rank.at is not None and rank.at.where.endswith(line) and rank.at.seconds > 1


def line_of(text: str) -> str:
    source = (Path(__file__).parent / "slow_rank.py").read_text().splitlines()
    return f"slow_rank.py:{next(number for number, line in enumerate(source, 1) if text in line)}"


def wait_for(out: Path, seen: Callable[[Run], bool]) -> Run:
    deadline_s = time.monotonic() + 150
    while time.monotonic() < deadline_s:
        with contextlib.suppress(FulltiltError):
            if seen(run := store.load(out)):
                return run
        time.sleep(0.5)
    raise AssertionError("it was never seen")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_stopped_rank_is_named_with_its_line(tmp_path: Path) -> None:
    out = tmp_path / "job"
    command = [sys.executable, "-m", "tests.faults.slow_rank", str(out), "stop", "2"]
    job = subprocess.Popen(command, cwd=Path(__file__).parents[2], start_new_session=True)
    try:
        here = line_of("<- here")
        run = wait_for(out, lambda run: len(run.ranks) == RANKS and _stands_at(run.ranks[2], here))
        os.kill(run.ranks[2].pid, signal.SIGSTOP)
        run = wait_for(out, lambda run: "no step for" in answer(run).verdict.sentence)
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    told = answer(run).verdict.sentence
    assert re.search(rf"rank 2 on host1 has written nothing for .* and was last at .*{line_of('<- here')}", told), told
    assert re.search(rf"3 ranks wait for it at .*{line_of('loss.backward()')}", told), told


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
            right = len(found) == 1 and "not always the same" in found[0].evidence[0]
        else:
            right = not found
        told = [repr(finding.evidence) for finding in found]
        print("run", number, kind, slow, *told, "right" if right else "wrong", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
