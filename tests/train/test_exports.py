"""The names that users import, and that the pure parts come without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fulltilt.train


def test_the_exported_names() -> None:
    assert fulltilt.train.__all__ == ["Job", "Outcome", "Stage", "StepEnd", "TrainSettings", "exit_code_of", "train"]
    assert all(hasattr(fulltilt.train, name) for name in fulltilt.train.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        fulltilt.train.nonsense  # noqa: B018


def test_the_pure_parts_come_without_torch() -> None:
    names = ("config", "stop")
    code = f"import sys; [__import__('fulltilt.train.' + n) for n in {names}]; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
