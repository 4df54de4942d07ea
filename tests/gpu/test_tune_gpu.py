"""A study on a GPU: trials in their own namespaces, VRAM over the batch. On a GPU of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from fulltilt.recorder.job_command import job_command
from fulltilt.records import Settings
from fulltilt.tuning.search_space import Attempt, Space, is_valid, vram_line
from fulltilt.tuning.study import Study
from fulltilt.tuning.trial.isolation import choose
from fulltilt.tuning.trial.throughput import Patience

pytestmark = pytest.mark.gpu

# Asks for the GPU early, as scripts do; the model goes there before the loader is made.
SCRIPT = """
import torch
from torch.utils.data import DataLoader, Dataset

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.cuda.set_per_process_memory_fraction(0.05)

class Rows(Dataset):
    def __len__(self):
        return 10_000_000

    def __getitem__(self, index):
        return torch.full((256,), float(index % 7)), index % 4

# Narrow and deep: the memory's peak lies in the activations, which grow with the batch, not in the optimizer.
model = torch.nn.Sequential()
model.extend([torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU()) for _ in range(128)])
model.append(torch.nn.Linear(256, 4)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for inputs, labels in DataLoader(Rows(), batch_size=1024, shuffle=True, num_workers=2):
    loss = torch.nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_trials_on_a_gpu_are_measured_in_isolation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    isolation, reasons = choose()
    assert isolation is not None, reasons
    quick = Patience(wanted_error=0.1, least_blocks=3, least_s=0.5, most_s=2.0)
    space = Space(4, frozenset({"batch"}))
    study = Study(["train.py"], job_command(["train.py"]), tmp_path / "study", space, isolation, 60.0, patience=quick)
    try:
        for settings in (Settings(), Settings(batch_size=4096), Settings(batch_size=8192)):
            attempt = Attempt(settings, "search" if study.trials else "start")
            study.trials.append(study.measure(attempt, 60.0, lambda _: None))
            print(study.trials[-1])
    finally:
        study.close()
    trials = study.trials
    assert isolation.kind == "namespace"
    assert all(is_valid(trial) for trial in trials)
    assert all(trial.gpu_util_pct is not None for trial in trials)
    line = vram_line(trials)
    assert line is not None
    assert line.slope > 128 * 256 * 4  # bytes of a sample's activations: one for each of the layers, at least
