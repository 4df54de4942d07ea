"""What a worker tells of its fetches, and what of it is believed."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fulltilt import store
from fulltilt.recorder.loaders.workers import (
    EARLY_SAMPLE_EVERY_S,
    EARLY_SAMPLES,
    SAMPLE_EVERY_S,
    FetchMeter,
    FilesRead,
    Mailbox,
    WorkerTotals,
    checked,
)
from fulltilt.recorder.rank_files import RankFiles
from fulltilt.recorder.rank_state import RankState


def meter_of(loader_id: int) -> tuple[Mailbox, FetchMeter]:
    mailbox = Mailbox()
    sending = mailbox.opened()
    assert sending is not None
    return mailbox, FetchMeter(sending, loader_id)


def test_no_fetch_is_lost_while_a_message_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    mailbox, meter = meter_of(7)

    def slowly() -> tuple[None, None, None]:
        meter.fetch(lambda: "a batch that comes while the memory is being measured")
        return None, None, None

    monkeypatch.setattr(meter, "_memory", slowly)
    meter.fetch(lambda: "a batch")
    meter.send()
    monkeypatch.undo()
    with pytest.raises(ValueError, match="torn"):
        meter.fetch(_torn)
    meter.fetch(lambda: "another batch")
    meter.send()
    messages = list(mailbox.receive())
    assert [message.batches for message in messages] == [2, 1]
    assert all(message.loader == 7 and message.fetch_s > 0 for message in messages)


def test_a_fetch_that_does_not_end_is_told_and_counted_once() -> None:
    mailbox, meter = meter_of(0)

    def long() -> None:
        for _ in range(3):
            time.sleep(0.02)
            meter.send()

    began = time.perf_counter()
    meter.fetch(long)
    took_s = time.perf_counter() - began
    meter.send()
    messages = list(mailbox.receive())
    assert [message.batches for message in messages] == [0, 0, 0, 1]
    assert all(message.fetch_s >= 0.02 and message.idle_s < 0.02 for message in messages[:3])
    assert sum(message.fetch_s for message in messages) == pytest.approx(took_s, abs=0.005)
    assert sum(message.fetch_cpu_s for message in messages) < took_s


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
    _, meter = meter_of(0)
    idle, busy = CountedWaits(EARLY_SAMPLES + 50), CountedWaits(EARLY_SAMPLES + 50)
    meter.observe(idle)
    assert max(idle.waits) <= 1.5 * EARLY_SAMPLE_EVERY_S  # nothing was seen yet
    meter.fetch(meter.observe, busy)
    assert max(busy.waits[:EARLY_SAMPLES]) <= 1.5 * EARLY_SAMPLE_EVERY_S
    assert min(busy.waits[EARLY_SAMPLES:]) >= 0.5 * SAMPLE_EVERY_S


GOOD = {
    "loader": 0,
    "pid": 1,
    "batches": 2,
    "fetch_s": 1.5,
    "fetch_cpu_s": 1.0,
    "cpu_wait_s": 0.1,
    "idle_s": 0.5,
    "process_cpu_s": 1.0,
    "read_bytes": 10,
    "pss_bytes": 20,
    "reads": 5,
    "private_bytes": 10,
    "shared_bytes": 7,
    "cpus": [0, 3],
    "lines": [{"where": "train.py:7", "function": "f", "seconds": 1.0}],
}


def damaged() -> list[bytes]:
    wrong: dict[str, Any] = {
        "loader": 99,
        "pid": "1",
        "batches": 2.5,
        "fetch_s": float("nan"),
        "fetch_cpu_s": float("inf"),
        "cpu_wait_s": -1.0,
        "idle_s": None,
        "process_cpu_s": [1.0],
        "read_bytes": 10**30,
        "pss_bytes": -5,
        "reads": "many",
        "private_bytes": 10**30,
        "shared_bytes": "some",
        "cpus": [-1],
        "lines": [{"where": 7, "function": "f", "seconds": 1.0}],
    }
    line = {"where": "train.py:7", "function": "f", "seconds": 1e300}
    messages = [{**GOOD, field: value} for field, value in wrong.items()]
    messages += [{key: value for key, value in GOOD.items() if key != left_out} for left_out in GOOD]
    messages += [{**GOOD, "lines": [line]}, {**GOOD, "batches": True}, {**GOOD, "idle_s": 10**400}]
    plain = [b"", b"\x00\xff\xfe", b"[]", b"null", b"7", b'"fetch"', b"{", b"[" * 50_000, b'{"pid": ' + b"9" * 9000]
    return [*plain, *(json.dumps(message).encode() for message in messages)]


def test_where_the_files_lie_that_a_worker_reads_is_told_once(tmp_path: Path) -> None:
    read = FilesRead()
    assert read.take() is None
    for number in range(8):
        folder = tmp_path / "pictures" / f"class-{number}"
        folder.mkdir(parents=True)
        (folder / "1.jpg").write_bytes(b"a picture")
        with (folder / "1.jpg").open("rb"), (tmp_path / "log.txt").open("a"):
            read.look()
    found = read.take()
    assert found is not None
    assert found.path == str(tmp_path / "pictures")
    assert found.filesystem is not None
    assert read.take() is None


def test_forged_messages_are_dropped() -> None:
    taps: Any = SimpleNamespace(mailbox=Mailbox(), all=[SimpleNamespace(pass_of_message=1, described={})])
    state = RankState(torch)
    state.taps = taps
    sending = taps.mailbox.opened()
    sending.send(json.dumps(GOOD).encode())
    state.poll()
    told = state.workers[0].record(0)
    assert (told.batches, told.fetch_s, told.pss_bytes) == (2, 1.5, 20)
    for data in damaged():
        sending.send(data)
        state.poll()
    assert list(state.workers) == [0]
    assert state.workers[0].record(0) == told


@pytest.mark.parametrize(("levels", "grows"), [((10, 30, 70), True), ((10, 60, 70), False), ((10, 60, 50), False)])
def test_memory_grows_where_it_does_so_steadily(
    monkeypatch: pytest.MonkeyPatch, levels: tuple[int, ...], grows: bool
) -> None:
    """Asked for after 2, 4 and 8 s: what is only filled at first grows ever slower."""
    totals, now_s = WorkerTotals(), iter((2.0, 4.0, 8.0))
    monkeypatch.setattr("fulltilt.recorder.loaders.workers.time.monotonic", lambda: next(now_s))
    for level in levels:
        message = checked(json.dumps({**GOOD, "private_bytes": level * 10**6}).encode())
        assert message is not None
        totals.add(message, in_pass=1)
    growth = totals.record(0).growth
    assert (growth is not None) == grows
    if growth is not None:
        assert (growth.bytes, growth.over_s, growth.batches) == (40_000_000, 4.0, 2)


def test_workers_on_their_own_cpus_use_all_of_them_together() -> None:
    totals = WorkerTotals()
    for pid, cpus in ((1, [0]), (2, [1]), (3, [1])):
        message = checked(json.dumps({**GOOD, "pid": pid, "cpus": cpus}).encode())
        assert message is not None
        totals.add(message, in_pass=1)
    assert totals.record(0).cpus == 2


def test_the_mailbox_has_no_name_that_others_could_write_to() -> None:
    mailbox = Mailbox()
    sending = mailbox.opened()
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
