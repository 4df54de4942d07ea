"""What a worker tells of its fetches."""

from __future__ import annotations

import threading
import time

import pytest

from fulltilt.recorder.worker_tap import EARLY_LOOK_EVERY_S, EARLY_LOOKS, LOOK_EVERY_S, FetchMeter, Mailbox


def test_no_fetch_is_lost_while_a_message_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    mailbox = Mailbox()
    assert mailbox.address is not None
    meter = FetchMeter(mailbox.address, 7)

    def slowly() -> None:
        meter.fetch(lambda: "a batch that comes while the memory is being measured")

    monkeypatch.setattr(meter, "_pss_bytes", slowly)
    meter.fetch(lambda: "a batch")
    meter.send()
    monkeypatch.undo()
    with pytest.raises(ValueError, match="torn"):
        meter.fetch(_torn)
    meter.fetch(lambda: "another batch")
    meter.send()
    messages = list(mailbox.receive())
    assert [message["batches"] for message in messages] == [2, 1]
    assert all(message["loader"] == 7 and message["fetch_s"] > 0 for message in messages)


def test_a_fetch_that_does_not_end_is_told_and_counted_once() -> None:
    mailbox = Mailbox()
    assert mailbox.address is not None
    meter = FetchMeter(mailbox.address, 0)

    def long() -> None:
        for _ in range(3):
            time.sleep(0.02)
            meter.send()

    began = time.perf_counter()
    meter.fetch(long)
    took_s = time.perf_counter() - began
    meter.send()
    messages = list(mailbox.receive())
    assert [message["batches"] for message in messages] == [0, 0, 0, 1]
    assert all(message["fetch_s"] >= 0.02 and message["idle_s"] < 0.02 for message in messages[:3])
    assert sum(message["fetch_s"] for message in messages) == pytest.approx(took_s, abs=0.005)
    assert sum(message["fetch_cpu_s"] for message in messages) < took_s


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
    mailbox = Mailbox()
    assert mailbox.address is not None
    meter = FetchMeter(mailbox.address, 0)
    idle, busy = CountedWaits(EARLY_LOOKS + 50), CountedWaits(EARLY_LOOKS + 50)
    meter.observe(idle)
    assert max(idle.waits) <= 1.5 * EARLY_LOOK_EVERY_S  # nothing was seen yet
    meter.fetch(meter.observe, busy)
    assert max(busy.waits[:EARLY_LOOKS]) <= 1.5 * EARLY_LOOK_EVERY_S
    assert min(busy.waits[EARLY_LOOKS:]) >= 0.5 * LOOK_EVERY_S
