"""What a worker tells of its fetches, and what of it is believed."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fulltilt import store
from fulltilt.recorder.loaders.workers import (
    EARLY_SAMPLE_EVERY_S,
    EARLY_SAMPLES,
    MOST_WORKERS,
    SAMPLE_EVERY_S,
    FetchTimer,
    FilesRead,
    MemoryReading,
    WorkerMessage,
    WorkerSocket,
    WorkerTotals,
)
from fulltilt.recorder.rank_files import RankFiles


def timer_of(loader_id: int) -> tuple[WorkerSocket, FetchTimer]:
    worker_socket = WorkerSocket()
    sending = worker_socket.opened()
    assert sending is not None
    return worker_socket, FetchTimer(sending, loader_id)


def test_a_fetch_that_fails_costs_time_and_brings_no_batch() -> None:
    worker_socket, timer = timer_of(7)
    timer.fetch(lambda: "a batch")
    timer.send()
    with pytest.raises(ValueError, match="torn"):
        timer.fetch(_torn)
    timer.fetch(lambda: "another batch")
    timer.send()
    first, second = worker_socket.receive()
    assert (first.loader, first.batches, second.batches) == (7, 1, 2)
    assert second.fetch_s > first.fetch_s > 0


def test_a_fetch_that_does_not_end_is_told_and_counted_once() -> None:
    worker_socket, timer = timer_of(0)

    def long() -> None:
        for _ in range(3):
            time.sleep(0.02)
            timer.send()

    began = time.perf_counter()
    timer.fetch(long)
    took_s = time.perf_counter() - began
    timer.send()
    messages = list(worker_socket.receive())
    assert [message.batches for message in messages] == [0, 0, 0, 1]
    for number, message in enumerate(messages[:3], start=1):
        assert message.fetch_s >= number * 0.02
        assert message.idle_s == pytest.approx(messages[0].idle_s, abs=0.005)
    assert messages[3].fetch_s == pytest.approx(took_s, abs=0.005)
    assert messages[3].fetch_cpu_s < took_s


def test_the_first_batch_of_a_pass_includes_what_its_iterator_did() -> None:
    worker_socket, timer = timer_of(0)
    for pass_s in (0.03, 0.02):
        timer.begin_pass(time.sleep, pass_s)
        for _ in range(3):
            timer.fetch(time.sleep, 0.001)
    timer.send()
    (told,) = worker_socket.receive()
    assert (told.batches, told.first_batches) == (6, 2)
    assert 0.052 <= told.first_fetch_s < told.fetch_s - 0.004
    assert told.first_fetch_cpu_s < 0.05


def test_threads_that_fetching_uses_are_a_part_of_its_cpu_time() -> None:
    worker_socket, timer = timer_of(0)

    def compute() -> None:
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass

    def decompress() -> None:
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()

    def send() -> None:
        compute()
        sent.set()
        told_of.wait()  # it lives as long as its worker

    sent, told_of = threading.Event(), threading.Event()
    timer.fetch(decompress)
    sends = threading.Thread(target=send, name="QueueFeederThread")
    sends.start()
    sent.wait()
    timer.send()
    told_of.set()
    sends.join()
    *_, told = worker_socket.receive()
    assert 0.05 <= told.fetch_cpu_s < 0.09
    assert told.process_cpu_s >= 0.1


def test_only_the_last_message_of_each_worker_counts() -> None:
    totals = WorkerTotals()
    for pid, batches, read_bytes, in_pass in ((1, 2, 10, 1), (2, 3, 20, 1), (1, 5, 40, 2), (1, 6, 45, 2)):
        message = replace(TOLD, pid=pid, batches=batches, fetch_s=batches * 0.5, read_bytes=read_bytes)
        totals.add(message, in_pass)
    told = totals.record(0)
    assert (told.processes, told.batches, told.fetch_s, told.read_bytes) == (2, 9, 4.5, 65)
    assert told.read_bytes_by_pass == (60, 5), "what was read since a message of the first pass"


def test_a_pid_used_again_in_a_later_pass_is_another_worker() -> None:
    totals = WorkerTotals()
    for in_pass in (1, 2):
        totals.add(replace(TOLD, in_pass=in_pass, batches=3 - in_pass, read_bytes=10), in_pass)
    told = totals.record(0)
    assert (told.processes, told.batches, told.read_bytes_by_pass) == (2, 3, (10, 10))


def test_very_many_workers_are_summed_and_not_kept() -> None:
    totals = WorkerTotals()
    for pass_, pid in enumerate([*range(2 * MOST_WORKERS), *range(10)]):  # the first numbers come again
        for batches in (1, 2):
            totals.add(replace(TOLD, pid=pid, batches=batches, fetch_s=batches * 0.5, read_bytes=None), pass_)
    told, workers = totals.record(0), 2 * MOST_WORKERS + 10
    assert (told.processes, told.batches, told.fetch_s, told.read_bytes) == (workers, 2 * workers, workers, None)
    assert len(totals.last) == MOST_WORKERS


def _torn() -> None:
    raise ValueError("a torn picture")


class CountedWaits(threading.Event):
    """An event that nobody waits for: how long each wait was to be."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.waits = most, list[float]()

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout or 0.0)
        return len(self.waits) > self.most


def test_a_worker_that_fetches_for_long_is_looked_at_less_often() -> None:
    _, timer = timer_of(0)
    idle, busy = CountedWaits(EARLY_SAMPLES + 50), CountedWaits(EARLY_SAMPLES + 50)
    timer.observe(idle)
    assert max(idle.waits) <= 1.5 * EARLY_SAMPLE_EVERY_S  # nothing was seen yet
    timer.fetch(timer.observe, busy)
    assert max(busy.waits[:EARLY_SAMPLES]) <= 1.5 * EARLY_SAMPLE_EVERY_S
    assert min(busy.waits[EARLY_SAMPLES:]) >= 0.5 * SAMPLE_EVERY_S


def test_a_look_that_fails_ends_neither_the_looks_nor_in_the_output_of_the_job(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def changed(*_: Any) -> None:
        raise RuntimeError("a look that fails")

    monkeypatch.setattr("fulltilt.recorder.loaders.workers.view_of", changed)
    _, timer = timer_of(0)
    looks = CountedWaits(5)
    timer.fetch(timer.observe, looks)
    assert len(looks.waits) == 6
    assert not any("a look that fails" in text for text in capfd.readouterr())


TOLD = WorkerMessage(0, 1, 1, batches=2, fetch_s=1.5, fetch_cpu_s=1.0, cpu_wait_s=0.1, idle_s=0.5, process_cpu_s=1.0)


def test_where_the_files_lie_that_a_worker_reads_is_told_once(tmp_path: Path) -> None:
    read = FilesRead()
    assert read.take() is None
    for number in range(8):
        folder = tmp_path / "pictures" / f"class-{number}"
        folder.mkdir(parents=True)
        (folder / "1.jpg").write_bytes(b"a picture")
        with (folder / "1.jpg").open("rb"), (tmp_path / "log.txt").open("a"):
            read.sample()
    found = read.take()
    assert found is not None
    assert found.path == str(tmp_path / "pictures")
    assert found.filesystem is not None
    assert read.take() is None


@pytest.mark.parametrize(("levels", "grows"), [((10, 30, 70), True), ((10, 60, 70), False), ((10, 60, 50), False)])
def test_memory_grows_where_it_does_so_steadily(levels: tuple[int, ...], grows: bool) -> None:
    """Asked for after 2, 4 and 8 s: what is only filled at first grows ever slower."""
    totals = WorkerTotals()
    readings = [
        MemoryReading(at_s, level * 10**6, 7, batches)
        for at_s, level, batches in zip((2.0, 4.0, 8.0), levels, (2, 4, 6), strict=True)
    ]
    totals.add(replace(TOLD, memory=tuple(readings)), 1)
    growth = totals.record(0).growth
    assert (growth is not None) == grows
    if growth is not None:
        assert (growth.bytes, growth.over_s, growth.batches) == (40_000_000, 4.0, 2)


def test_workers_on_their_own_cpus_use_all_of_them_together() -> None:
    totals = WorkerTotals()
    for pid, cpus in ((1, (0,)), (2, (1,)), (3, (1,))):
        totals.add(replace(TOLD, pid=pid, cpus=cpus), 1)
    assert totals.record(0).cpus == 2


def test_the_worker_socket_has_no_name_that_others_could_write_to() -> None:
    worker_socket = WorkerSocket()
    sending = worker_socket.opened()
    assert sending is not None
    assert sending.getsockname() == sending.getpeername() == ""


def test_a_claim_of_others_is_left_as_it_is(tmp_path: Path) -> None:
    folder = store.create_folder(tmp_path / "run")
    (folder / ".claim-0").write_text("thesis")
    assert RankFiles.claim(folder, 0).stream == 1
    assert (folder / ".claim-0").read_text() == "thesis"


def test_a_rank_takes_its_own_claim_and_that_of_the_dead(tmp_path: Path) -> None:
    folder = store.create_folder(tmp_path / "run")
    child = os.fork()
    if child == 0:
        RankFiles.claim(folder, 0)
        os._exit(0)
    os.waitpid(child, 0)
    assert (folder / ".claim-0").read_text() == str(child)
    assert RankFiles.claim(folder, 0).stream == 0
    assert RankFiles.claim(folder, 0).stream == 0
    store.create_folder(folder)  # a later run finds no stranger's files
