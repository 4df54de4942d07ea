"""A model's name: asked for once where the hub does not answer, and then told; what was fetched before still works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import FileMetadataError

from fulltilt.errors import UsageError
from fulltilt.recipes import find, options, pretrained

NAMED = {
    "cod": {"weights": "pretrained", "backbone": "test_resnet"},
    "carclip": {"model": "openai/clip-vit-base-patch32"},
    "visobert": {"model": "uitnlp/visobert"},
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The questions to a hub that cannot be reached."""
    questions: list[str] = []

    def unreachable(url: str, **how: Any) -> None:
        questions.append(url)
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unreachable)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return questions


@pytest.mark.parametrize("name", NAMED)
def test_a_hub_that_does_not_answer_is_asked_once_and_told_before_data_is_made(
    name: str, asked: list[str], tmp_path: Path
) -> None:
    """Seen to fail: the hub's library tries every file six times, which took 49 s."""
    recipe = find(name)
    request = options.read(recipe, {"data": "synthetic", **NAMED[name]}).request(tmp_path, tmp_path / "out")
    with pytest.raises(UsageError, match="does not answer: Name or service not known"):
        recipe.check_options(request)
    assert len(asked) == 1


def test_what_was_fetched_before_is_used_without_the_hub(asked: list[str], tmp_path: Path) -> None:
    kept = tmp_path / "hub" / "models--uitnlp--visobert" / "snapshots" / "abc"
    kept.mkdir(parents=True)
    (kept / "config.json").write_text("{}")
    assert pretrained.only_kept_files("uitnlp/visobert", "Give a folder.")
    assert not pretrained.only_kept_files(str(kept), "Give a folder."), "a folder needs no hub"
    assert len(asked) == 1


def test_an_answer_of_any_kind_is_left_to_the_hubs_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def strange(url: str, **how: Any) -> None:
        raise FileMetadataError("no commit")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", strange)
    assert not pretrained.only_kept_files("uitnlp/visobert", "Give a folder.")
    assert not pretrained.only_kept_files("no such/name", "Give a folder.")
