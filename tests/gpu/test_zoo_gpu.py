"""Every job of the zoo that needs a GPU, one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.zoo.catalogue import CATALOGUE
from tests.zoo.catalogue import Specimen
from tests.zoo.observation import observe, problems

pytestmark = [pytest.mark.gpu, pytest.mark.quiet]


@pytest.mark.parametrize("specimen", CATALOGUE, ids=str)
def test_job_is_explained_truly(specimen: Specimen, tmp_path: Path) -> None:
    seen = observe(specimen, tmp_path)
    wrong = problems(seen)
    assert not wrong, "\n".join([f"{specimen}:", *(f"  {problem}" for problem in wrong), str(seen)])
