"""Wheel and sdist, each installed into an environment that has nothing else, and used there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
UV = ROOT / ".uv/bin/uv"
JOB = """
import torch
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(20):
    optimizer.zero_grad(); model(torch.randn(4, 8)).mean().backward(); optimizer.step()
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not UV.exists(), reason="needs uv in .uv, which make setup puts there"),
]


def run(*command: object, cwd: Path, code: int = 0) -> str:
    # Nothing of this environment may be found from the new one.
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    words = [str(word) for word in command]
    ended = subprocess.run(words, cwd=cwd, env=clean, capture_output=True, text=True, check=False)
    assert ended.returncode == code, f"{' '.join(words)}\n{ended.stdout}{ended.stderr}"
    return ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    run(UV, "build", "--quiet", "--out-dir", out, ROOT, cwd=out)
    return out


@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"], ids=["wheel", "sdist"])
def test_it_installs_and_runs_in_a_clean_environment(kind: str, built: Path, tmp_path: Path) -> None:
    [package] = built.glob(kind)
    run(UV, "venv", "--quiet", "--python", sys.executable, "env", cwd=tmp_path)
    python, fulltilt = tmp_path / "env/bin/python", tmp_path / "env/bin/fulltilt"
    run(UV, "pip", "install", "--quiet", "--python", python, package, cwd=tmp_path)
    where = run(python, "-c", "import fulltilt; print(fulltilt.__file__)", cwd=tmp_path).strip()
    assert Path(where).is_relative_to(tmp_path / "env")
    assert Path(where).with_name("py.typed").exists()
    (tmp_path / "train.py").write_text(JOB)
    assert "20 steps" in run(fulltilt, "run", "--out", "run", "train.py", cwd=tmp_path)
    assert (tmp_path / "run/report.html").exists()
    assert 'pip install "fulltilt[train,recipes]"' in run(fulltilt, "train", "cod", cwd=tmp_path, code=2)
    assert run(fulltilt, "--version", cwd=tmp_path).startswith("fulltilt ")
