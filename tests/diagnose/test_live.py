"""What live tuning did stands in the settings and in the verdict."""

from __future__ import annotations

from dataclasses import replace

from fulltilt.diagnose.live import live_record, live_settings, live_words
from fulltilt.records import LiveRecord, Settings

BEFORE = Settings(num_workers=0, pin_memory=False)
AFTER = Settings(num_workers=7, prefetch_factor=2, pin_memory=False, persistent_workers=True)
TUNED = LiveRecord(
    0,
    "settled",
    "the loader is no longer the limit",
    BEFORE,
    AFTER,
    before_batches_per_s=20.0,
    before_wait_share=0.83,
    batches_per_s=88.0,
    wait_share=0.02,
)


def test_the_settings_say_what_was_and_what_is() -> None:
    settings = dict(live_settings(TUNED))
    assert settings["live"] == "settled"
    assert settings["live.num_workers"] == "0 → 7"
    assert settings["live.persistent_workers"] == "default → on"
    assert "live.pin_memory" not in settings
    assert live_settings(None) == ()


def test_the_words_give_the_gain() -> None:
    words = live_words(TUNED)
    assert "num_workers 0 → 7" in words
    assert "4.4 × as many batches a second" in words
    assert "data wait 83 % → 2" in words


def test_a_loader_that_was_left_alone_says_why() -> None:
    alone = replace(TUNED, state="left_alone", why="its data set draws random numbers", settings=BEFORE)
    assert live_words(alone) == "live tuning left the loader alone: its data set draws random numbers"
    assert live_words(replace(alone, state="settled", why="no need")) == "live tuning changed nothing: no need"


def test_without_auto_there_is_nothing() -> None:
    assert live_record(None, None) is None
