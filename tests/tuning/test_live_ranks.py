"""Live tuning in a job of several ranks: one decision for all, at the same batch, and nobody waits for a report."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.utils.data import DataLoader

from fulltilt import store
from fulltilt.errors import RunFolderError
from fulltilt.probes.host import cpu_capacity
from fulltilt.records import RunRecord, Task
from fulltilt.tuning.live.controller import Capacity, most_workers
from fulltilt.tuning.live.measurement import Knobs, Measurement
from fulltilt.tuning.live.rank_reports import RankReports, Report, agree
from fulltilt.tuning.live.tuner import Phase
from tests.diagnosis.examples import machine
from tests.faults.ranks import free_port
from tests.tuning.live_jobs import HASTY, Squares, Tuning, flat, tuning

JOB = Path(__file__).with_name("ranks_job.py")
BATCHES = 600
LIMIT_S = 400


def seen(wait_share: float, workers: int = 0) -> Measurement:
    return Measurement(Knobs(workers), 10.0, 0.01, wait_share, (1 - wait_share) / 10.0)


def report(batch: int = 30, wait_share: float = 0.5, host: str = "a", cpus: float = 8.0, mask: str = "ff") -> Report:
    return Report("train.py:3 0", batch, host, mask, Knobs(0), Capacity(cpus), seen=seen(wait_share))


# --------------------------------------------------------------------------- what reports come to


def test_the_slowest_rank_speaks_for_all() -> None:
    agreed = agree([report(wait_share=0.1), report(wait_share=0.6), report(wait_share=0.3)])
    assert agreed.seen == seen(0.6)


def test_the_ranks_of_a_machine_divide_its_cpus() -> None:
    agreed = agree([report(host="a", cpus=16), report(host="b", cpus=12), report(host="b", cpus=12)])
    assert (agreed.capacity.cpus, agreed.capacity.ranks) == (12, 2)
    assert most_workers(agreed.capacity, 2) == (6, "12 usable CPUs for 2 ranks")


def test_cpus_that_a_launcher_has_divided_already_are_not_divided_again() -> None:
    agreed = agree([report(cpus=4, mask="0f"), report(cpus=4, mask="f0")])
    assert (agreed.capacity.ranks, most_workers(agreed.capacity, 2)) == (2, (4, "4 usable CPUs"))


@pytest.mark.parametrize("cpu_share", [None, 0.05, 1.0])
def test_ranks_together_have_no_more_workers_than_cpus(cpu_share: float | None) -> None:
    for cpus in (1.0, 1.5, 2.0, 7.0, 64.0):
        for ranks in (2, 3, 8):
            capacity = Capacity(cpus, cpu_share=cpu_share, ranks=ranks, cpu_ranks=ranks)
            assert ranks * most_workers(capacity, 2)[0] <= cpus


def test_one_rank_left_alone_leaves_all_alone() -> None:
    alone = replace(report(), seen=None, left_alone="its class Mine iterates in a way of its own")
    assert agree([report(), alone]).left_alone == "on rank 1, its class Mine iterates in a way of its own"


def test_ranks_with_other_settings_are_left_alone() -> None:
    why = agree([report(), replace(report(), knobs=Knobs(2))]).left_alone
    assert why == "its settings are not the same on all ranks (no workers on rank 0, 2 workers, prefetch 2 on rank 1)"


def test_a_trial_that_failed_on_one_rank_failed_on_all() -> None:
    agreed = agree([report(), replace(report(), seen=None, failed="RuntimeError: gone")])
    assert agreed.failed == "on rank 1, RuntimeError: gone"


@pytest.mark.parametrize("drawn", [(False, False), (False, True)])
def test_random_draws_on_one_rank_are_random_draws(drawn: tuple[bool, ...]) -> None:
    assert agree([replace(report(), seen=None, is_random=one) for one in drawn]).is_random == any(drawn)


# --------------------------------------------------------------------------- through the folder


def run_folder(path: Path, task: Task | None = None) -> Path:
    folder = store.create_folder(path) if task is None else store.create_task_folder(path, f"{task.number}-a")
    store.write_json(folder / store.RUN_FILE, RunRecord("job", ("job.py",), "", machine(), "1", task=task))
    return folder


@pytest.fixture(params=["one run", "tasks"])
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> list[Path]:
    """The run folders of two ranks: the same one, or those of two tasks."""
    if request.param == "one run":
        return [run_folder(tmp_path / "run")] * 2
    return [run_folder(tmp_path / "job", Task("job", number, 2, 0)) for number in range(2)]


def test_all_ranks_get_the_same_at_a_batch_that_none_has_reached(folders: list[Path]) -> None:
    ranks = [RankReports(folder, "group.2.0", rank, 2) for rank, folder in enumerate(folders)]
    for number, batches in enumerate([(30, 33), (90, 80)]):
        for one, batch in zip(ranks, batches, strict=True):
            assert one.agreed("train.py:3 0", number, batch, 10.0) is None
            one.write(report(batch, wait_share=batch / 100))
        assert ranks[1].agreed("train.py:3 0", number, batches[1], 10.0) is None  # rank 0 has not looked yet
        assert ranks[0].agreed("train.py:3 0", number, batches[0] + 8, 10.0) is None
        first, second = (one.agreed("train.py:3 0", number, 99, 10.0) for one in ranks)
        assert first == second
        assert first is not None
        assert first.seen is not None
        assert first.seen.wait_share == max(batches) / 100
        assert first.batch == max(batches[0] + 8, batches[1]) + 12
    assert ranks[1].agreed("train.py:9 0", 0, 99, 10.0) is None  # another loader


def test_as_long_as_a_report_is_missing_nothing_is_agreed(folders: list[Path]) -> None:
    ranks = [RankReports(folder, "group.3.0", rank, 3) for rank, folder in enumerate(folders)]
    for one in ranks:
        one.write(report())
        assert one.agreed("train.py:3 0", 0, 40, 10.0) is None
    assert ranks[0].agreed("train.py:3 0", 0, 4000, 10.0) is None
    assert ranks[0].waiting_for == 2


@pytest.mark.parametrize("reports_before", [False, True])
def test_a_loader_that_rank_0_leaves_alone_is_left_alone_by_all(reports_before: bool, folders: list[Path]) -> None:
    ranks = [RankReports(folder, "group.2.0", rank, 2) for rank, folder in enumerate(folders)]
    if reports_before:
        ranks[0].write(report())
    ranks[0].write(replace(report(), seen=None, left_alone="it is mine"))
    ranks[1].write(report())
    agreed = ranks[1].agreed("train.py:3 0", 0, 40, 10.0)
    assert agreed is not None
    assert (agreed.left_alone, agreed.batch) == ("on rank 0, it is mine", 40)


# --------------------------------------------------------------------------- one rank's tuner


class TwoRanks:
    """Rank 0 is tuned here; what rank 1 reports is the test's to say."""

    def __init__(self, one: Tuning, folder: Path) -> None:
        self.one = one
        store.write_json(folder / store.RUN_FILE, RunRecord("job", ("job.py",), "", machine(), "1"))
        one.session.state.group, one.session.state.world_size = "group.2.0", 2
        self.other = RankReports(folder, "group.2.0", 1, 2)

    def answer(self, **what: Any) -> None:
        """Report what rank 0 has reported last, but for this."""
        ranks = self.one.live.ranks
        assert ranks is not None
        last = ranks._line(ranks._file(0), self.one.tuner._key, self.one.tuner._reported - 1)
        assert last is not None
        self.other.write(replace(last, **what))

    @property
    def is_waiting(self) -> bool:
        return self.one.tuner.phase is Phase.AGREEING


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks look for each other at every batch and move two batches later."""
    monkeypatch.setattr("fulltilt.tuning.live.rank_reports.AHEAD_S", 0.0)
    monkeypatch.setattr("fulltilt.tuning.live.tuner.LOOK_EVERY_S", 0.0)


def drawn_while(pair: TwoRanks, loader: Any, answers: Iterable[dict[str, Any]]) -> list[Any]:
    """The batches of a pass in which rank 1 gives these answers, each as soon as rank 0 waits for one."""
    answers, drawn, reported = iter(answers), [], 0
    for batch in loader:
        drawn.append(flat(batch))
        if pair.is_waiting and pair.one.tuner._reported > reported:
            reported = pair.one.tuner._reported
            if (answer := next(answers, None)) is not None:
                pair.answer(**answer)
    return drawn


SIZE = 80
FAILED = {"seen": None, "failed": "RuntimeError: gone"}
LEFT_ALONE = {"seen": None, "left_alone": "it is mine"}


@pytest.mark.parametrize(
    ("answers", "outcomes", "state", "workers"),
    [
        ([{}, {}, {}, {}], ["kept"], "settled", 2),
        ([{}, {}, FAILED], ["failed"], "settled", 0),
        ([{}, {}, LEFT_ALONE], ["failed"], "left_alone", 0),
        ([{}, {}, {}, LEFT_ALONE], ["failed"], "left_alone", 0),
        ([{}, LEFT_ALONE], [], "left_alone", 0),
        ([{}, {}], ["trying"], "trying", 0),
        ([], [], "watching", 0),
    ],
    ids=[
        *("agrees", "its trial fails", "is left alone meanwhile", "is left alone behind it", "is left alone before"),
        *("falls silent", "is silent"),
    ],
)
@pytest.mark.usefixtures("at_once")
def test_rank_0_does_what_both_ranks_can_do(
    answers: list[dict[str, Any]], outcomes: list[str], state: str, workers: int, tmp_path: Path
) -> None:
    expected = [flat(batch) for batch in DataLoader(Squares(SIZE), batch_size=2)]
    with tuning(tmp_path, [Knobs(2)]) as one:
        pair = TwoRanks(one, tmp_path)
        loader = one.trains(DataLoader(Squares(SIZE), batch_size=2))
        assert drawn_while(pair, loader, answers) == expected
        assert [move.outcome for move in one.record.moves] == outcomes
        assert (one.record.state, one.record.settings.num_workers) == (state, workers)
        assert one.session.loaders.of(loader).record(True).num_workers == workers
        assert [flat(batch) for batch in loader] == expected


@pytest.mark.usefixtures("at_once")
def test_a_trial_that_fails_here_is_over_on_all_ranks(tmp_path: Path) -> None:
    limits = replace(HASTY, batch_s=2.0, least_batches=9)
    with tuning(tmp_path, [Knobs(2)], limits=limits) as one:
        pair = TwoRanks(one, tmp_path)
        loader = one.trains(DataLoader(Squares(2 * SIZE), batch_size=2))
        answered, killed = 0, False
        for _ in loader:
            if one.record.state == "trying" and one.source.is_steady and not killed:
                killed = True
                for worker in one.source.pool.iterator._workers:
                    worker.kill()
                    worker.join()
            if pair.is_waiting and one.tuner._reported > answered:
                answered += 1
                pair.answer(**({"failed": None, "seen": seen(0.1, workers=2)} if killed else {}))
        assert (killed, answered, one.record.state) == (True, 3, "settled")
        (move,) = one.record.moves
        assert (move.outcome, one.record.settings.num_workers) == ("failed", 0)
        assert not one.tuner._is_trying


@pytest.mark.usefixtures("at_once")
def test_a_full_disk_ends_the_tuning_and_not_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise RunFolderError("no space left on device")

    with tuning(tmp_path, [Knobs(2)]) as one:
        TwoRanks(one, tmp_path)
        monkeypatch.setattr(RankReports, "write", full)
        loader = one.trains(DataLoader(Squares(SIZE), batch_size=2))
        assert len(list(loader)) == SIZE / 2
        assert one.record.why == "an internal error ended tuning (RunFolderError: no space left on device)"


def test_tasks_that_have_not_met_are_left_alone(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, Task("job", 0, 2, 0))
    with tuning(folder, [Knobs(2)]) as one:
        assert len(list(one.trains(DataLoader(Squares(SIZE), batch_size=2)))) == SIZE / 2
        assert (one.record.state, one.record.moves) == ("left_alone", ())
        assert "one of several tasks" in one.record.why


# --------------------------------------------------------------------------- whole jobs


def launch(out: Path, special: str = "", batches: int = BATCHES, auto: str = "") -> tuple[int, int]:
    """Two ranks: as they are, as one run, or as two tasks of a job. Returns the exit code and `listening_ports`."""
    out.mkdir()
    run = [sys.executable, "-m", "fulltilt", "run", "--auto", "--out", str(out / "run")]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    before, between = ([*run, "--"] if auto == "one run" else []), (["--no-python", *run] if auto == "tasks" else [])
    command = [*before, *torchrun, *between, str(JOB), str(batches), str(out), special]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (out / "errors").open("w") as errors, subprocess.Popen(command, env=environment, stderr=errors) as process:
        ports = listening_ports(process)
    return process.returncode, ports


def told(out: Path) -> list[str]:
    return [(out / f"{rank}.txt").read_text() for rank in range(2)]


def listening_ports(process: subprocess.Popen[bytes]) -> int:
    """At how many ports the processes of a job listen, the most that were seen until it ends."""
    most = 0
    while process.poll() is None:
        ports = set()
        try:
            for one in [(job := psutil.Process(process.pid)), *job.children(recursive=True)]:
                ports |= {c.laddr.port for c in one.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        except psutil.Error:
            continue  # it has just ended
        most = max(most, len(ports))
        try:
            process.wait(1)
        except subprocess.TimeoutExpired:
            continue
    return most


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], int]:
    """What the ranks tell without Fulltilt, and at how many ports they listen."""
    out = tmp_path_factory.mktemp("plain") / "out"
    code, ports = launch(out)
    assert code == 0
    return told(out), ports


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.skipif(cpu_capacity().usable < 2, reason="there is no room for a worker on each of two ranks")
@pytest.mark.parametrize(("auto", "special"), [("one run", ""), ("tasks", "pauses")])
def test_two_ranks_move_together_and_train_what_they_train_without(
    auto: str, special: str, plain: tuple[list[str], int], tmp_path: Path
) -> None:
    code, ports = launch(tmp_path / "out", special, auto=auto)
    errors = (tmp_path / "out" / "errors").read_text()
    assert code == 0, errors
    assert (told(tmp_path / "out"), ports) == plain
    run = store.load(tmp_path / "out" / "run")
    one, other = (live for rank in run.ranks for live in rank.live)
    assert one.settings == other.settings
    assert 1 <= one.settings.num_workers <= cpu_capacity().usable / 2
    assert [(move.batch, move.settings, move.outcome) for move in one.moves] == [
        (move.batch, move.settings, move.outcome) for move in other.moves
    ]
    assert one.moves[0].outcome == "kept"
    assert (one.wait_share, one.before_wait_share) == (other.wait_share, other.before_wait_share)
    assert one.wait_share < one.before_wait_share
    assert f"num_workers 0 → {one.settings.num_workers}" in " ".join(errors.split())
    assert "(each of 2 ranks)" in " ".join(errors.split())
    assert "settings found" in errors


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_nobody_moves_where_the_loader_of_one_rank_cannot_be_tuned(tmp_path: Path) -> None:
    code, _ = launch(tmp_path / "out", "own_sampler", BATCHES // 2, auto="one run")
    errors = (tmp_path / "out" / "errors").read_text()
    assert code == 0, errors
    lives = [live for rank in store.load(tmp_path / "out" / "run").ranks for live in rank.live]
    assert [(live.state, live.moves, live.settings.num_workers) for live in lives] == [("left_alone", (), 0)] * 2
    assert lives[0].why.startswith("on rank 1, its sampler OwnSampler may depend on")
    assert "its sampler OwnSampler may depend on" in errors


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_a_rank_that_dies_ends_the_job_as_it_does_without(tmp_path: Path) -> None:
    code, _ = launch(tmp_path / "out", "dies", auto="one run")
    assert code == 1
    assert "exitcode  : 7" in (tmp_path / "out" / "errors").read_text()
