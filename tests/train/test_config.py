"""Bad configs. Every problem is listed at once, before any work."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fulltilt.errors import UsageError
from fulltilt.train import config
from fulltilt.train.config import TrainSettings

NAMES = [field.name for field in dataclasses.fields(TrainSettings)]


def problems(given: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as caught:
        config.parse(given, TrainSettings, "run.yaml")
    assert caught.value.exit_code == 2
    return caught.value.what


def test_every_problem_at_once_with_what_was_meant() -> None:
    """Seen to fail: with unknown keys passed over in `config.parse` the first line counts five problems."""
    told = problems(
        {
            "batch_sise": 32,
            "lr": "fast",
            "epochs": -3,
            "clip_norm": math.nan,
            "precision": "bf-16",
            "workers": True,
            "xyzzy": 1,
        }
    )
    assert told.splitlines() == [
        "7 problems in run.yaml:",
        "'batch_sise': there is no such setting; did you mean batch_size?",
        "lr: should be a number, not 'fast'",
        "epochs: should be at least 1, not -3",
        "clip_norm: should be a finite number, not nan",
        "precision: should be one of auto, bf16, fp16, fp32, not 'bf-16'; did you mean bf16?",
        "workers: should be a whole number, not True",
        "'xyzzy': there is no such setting",
    ]


def test_settings_that_contradict_each_other() -> None:
    told = problems({"lr": 0.001, "min_lr": 0.01, "warmup_epochs": 5, "epochs": 2, "warmup_steps": 3, "target": 0.9})
    assert "target needs monitor" in told
    assert "min_lr (0.01) is above lr (0.001)" in told
    assert "warmup_epochs (5) is longer than the run (2 epochs)" in told
    assert "give warmup_steps or warmup_epochs, not both" in told


@pytest.mark.parametrize("other", [{"compile": True}, {"channels_last": True}, {"optimizer": "adamw8bit"}])
def test_what_fsdp_does_not_go_with(other: dict[str, Any]) -> None:
    config.parse({"fsdp": True}, TrainSettings)
    config.parse(other, TrainSettings)
    with pytest.raises(UsageError, match=f"fsdp and {next(iter(other))}: .* do not go together"):
        config.parse({"fsdp": True, **other}, TrainSettings)


def test_more_than_any_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: 100,000 workers were started one by one until the memory was gone; a batch of 10²¹ overflowed."""
    told = problems({"batch_size": 10**21, "max_steps": 2**31, "prefetch": 10**6})
    assert told.count("should be at most") == 3
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert "workers: should be at most 1,024, not 100,000" in problems({"workers": 100_000})
    assert config.parse({"workers": 1024, "batch_size": 2**31 - 1}, TrainSettings).workers == 1024
    monkeypatch.setenv("WORLD_SIZE", "128")  # their workers are counted together
    assert config.parse({"workers": 100_000}, TrainSettings).workers == 100_000


def test_a_key_that_is_no_name(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("epochs: 1\n1: 2\n")
    with pytest.raises(UsageError, match=r"run\.yaml: 1 is not the name of a setting"):
        config.read(tmp_path / "run.yaml")


def test_good_ones_come_through() -> None:
    made = config.parse({"lr": 1, "max_time_s": "11h", "clip_norm": None, "batch_size": 64}, TrainSettings)
    assert (made.lr, made.max_time_s, made.clip_norm, made.batch_size) == (1.0, 39600.0, None, 64)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("30m", 1800), ("1h30m", 5400), ("1.5h", 5400), ("20 min", 1200), ("2d", 172800)],
)
def test_durations(text: str, seconds: float) -> None:
    assert config.duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "1x", "1h30", "-5s", "1e9s", "5 s s", "nan"])
def test_no_durations(text: str) -> None:
    assert config.duration_s(text) is None


BOMB = "a: &a [x, x, x, x]\nb: &b [*a, *a, *a, *a]\nc: &c [*b, *b, *b, *b]\nlr: *c\n"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("bomb.yaml", BOMB, r"aliases \(\*name\) are not allowed"),
        ("deep.json", "[" * 100_000, "not a valid config"),
        ("deep.yaml", "[" * 1000, "not a valid config"),
        ("large.yaml", "# " + "x" * 300_000, "a config has at most"),
        ("object.yaml", "lr: !!python/object/apply:os.system ['true']", "not a valid config: line 1"),
        ("list.yaml", "- 1\n- 2\n", "should hold names and values, not list"),
        ("broken.toml", "lr = ", "not a valid config"),
        ("latin.yaml", "name: \x00", "not a valid config"),
        ("run.ini", "lr=1", r"configs end in"),
        ("missing.yaml", None, "cannot read"),
        ("twice.yaml", "lr: 1\nepochs: 2\nlr: 2\n", r"twice.yaml is not a valid config: line 3: the key 'lr' stands"),
        ("twice.toml", "lr = 1\nepochs = 2\nlr = 2\n", r"twice.toml is not a valid config: .*at line 3"),
        ("twice.json", '{"lr": 1,\n"out": "lr",\n"lr": 2}', r"twice.json is not .*the key 'lr' stands twice: line 3"),
        ("map.yaml", "!!map [1]", "not a valid config"),
    ],
)
def test_files_that_are_refused(name: str, content: str | None, words: str, tmp_path: Path) -> None:
    """Seen to fail: with the alias check of `_read_yaml` removed the bomb is read."""
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=words):
        config.parse(config.read(path), TrainSettings)


def test_the_number_that_yaml_takes_for_text(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("lr: 2e-5\nepochs: 20\nmax_time_s: 11h\n")
    made = config.parse(config.read(tmp_path / "run.yaml"), TrainSettings)
    assert (made.lr, made.epochs, made.max_time_s) == (2e-5, 20, 39600.0)


def test_toml_and_json_and_nothing(tmp_path: Path) -> None:
    for name, content in (("a.toml", "lr = 2e-5"), ("a.json", '{"lr": 2e-5}'), ("a.yml", "lr: 0.00002")):
        (tmp_path / name).write_text(content)
        assert config.parse(config.read(tmp_path / name), TrainSettings).lr == 2e-5
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    assert config.parse(config.read(tmp_path / "empty.yaml"), TrainSettings) == TrainSettings()


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from([[], {}, [1, {"a": 2}], {"lr": 1}, 10**400, "1h", b"bytes", object]),
)
keys = st.sampled_from(NAMES) | st.text(max_size=12) | st.sampled_from(NAMES).map(lambda name: name[:-1] + "x")


def complaint(call: Callable[[], Any]) -> str | None:
    """What the error says, or None when all was well. Any other exception fails the test."""
    try:
        call()
    except UsageError as error:
        return error.what or "an empty message"
    return None


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(st.dictionaries(keys, values, max_size=5))
def test_fuzzed_configs(given: dict[str, Any]) -> None:
    told = complaint(lambda: config.parse(given, TrainSettings))
    unknown = given.keys() - set(NAMES)
    if told is None:
        made = config.parse(given, TrainSettings)
        assert not unknown
        assert all(not isinstance(v, float) or math.isfinite(v) for v in dataclasses.asdict(made).values())
    else:
        assert all(config._short(name) in told for name in unknown)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(st.text(max_size=60), st.sampled_from(["yaml", "toml", "json"]))
def test_any_text_is_a_config_or_a_clear_error(tmp_path_factory: pytest.TempPathFactory, text: str, form: str) -> None:
    path = tmp_path_factory.getbasetemp() / f"fuzz.{form}"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    complaint(lambda: config.parse(config.read(path), TrainSettings))
