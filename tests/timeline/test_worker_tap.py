"""What a worker tells of its fetches."""

from __future__ import annotations

import pytest

from fulltilt.timeline.worker_tap import FetchMeter, Mailbox


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


def _torn() -> None:
    raise ValueError("a torn picture")
