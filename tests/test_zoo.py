"""Every job of the zoo, one by one: the right cause first, at the right line, with true figures."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from fulltilt.records import FindingCode
from tests.gpu.zoo.catalogue import CATALOGUE as GPU_CATALOGUE
from tests.zoo.catalogue import CATALOGUE, ZOO, Specimen
from tests.zoo.observation import NotPossibleHere, observe, problems

# The zoo's own machinery, and a code that only a failing machine shows (tested with a fake driver).
NO_SPECIMENS = {"__init__.py", "catalogue.py", "observation.py", "stopwatch.py", "neighbour.py"}
ONLY_WITH_FAKES = {"throttled"}
# A job takes about eight seconds, most of them to import torch: one of each kind runs in CI, all in `make test-zoo`.
IN_CI = {"serial_waits.py", "sleep_after_step.py"}


@pytest.mark.quiet
@pytest.mark.parametrize(
    "specimen",
    [pytest.param(one, marks=() if one.script in IN_CI else pytest.mark.slow, id=str(one)) for one in CATALOGUE],
)
def test_job_is_explained_truly(specimen: Specimen, tmp_path: Path) -> None:
    try:
        seen = observe(specimen, tmp_path)
    except NotPossibleHere as reason:
        pytest.skip(f"{specimen} CANNOT RUN HERE: {reason}")
    wrong = problems(seen)
    assert not wrong, "\n".join([f"{specimen}:", *(f"  {problem}" for problem in wrong), str(seen)])


def test_zoo_has_a_specimen_of_every_finding() -> None:
    codes = {code for specimen in (*CATALOGUE, *GPU_CATALOGUE) for code in (specimen.code, specimen.also)}
    assert codes - {None} == set(get_args(FindingCode)) - ONLY_WITH_FAKES
    assert len(CATALOGUE) + len(GPU_CATALOGUE) >= 30


def test_every_script_is_in_a_catalogue_and_knows_nothing_of_fulltilt() -> None:
    for folder, catalogue in ((ZOO, CATALOGUE), (ZOO.parent / "gpu" / "zoo", GPU_CATALOGUE)):
        scripts = {path.name for path in folder.glob("*.py")} - NO_SPECIMENS
        assert scripts == {specimen.script for specimen in catalogue if "/" not in specimen.script}
        for specimen in catalogue:
            assert "fulltilt" not in specimen.path.read_text(encoding="utf-8").lower()
