"""Names that are code, in everything that a training leaves behind or shows."""

from __future__ import annotations

import csv
import io
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from fulltilt.train.config import TrainSettings
from fulltilt.train.job import Job
from fulltilt.train.loop import train
from fulltilt.train.progress import TrainingScreen
from tests.faults import victim

SCRIPT = "<script>alert(1)</script>"
IMAGE = '"><img src=http://127.0.0.1:9/x onerror=alert(2)>'
CODES = "\x1b]0;owned\x07\x1b[2J\u202egpj"


class Elements(HTMLParser):
    """The elements of a page with their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A training whose job, folder, source file, data set and metric have such names."""
    out = tmp_path_factory.mktemp("out") / f"{IMAGE.replace('/', '_')}{CODES}"
    # The user's own code, in a file of that name: its lines are among the costly ones.
    source = "def loss(model, batch):\n    total = sum(i % 7 for i in range(300_000))\n    return inner(model, batch)\n"

    def noisy(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        value, metrics = victim.loss(model, batch)
        return value, {f"{SCRIPT}{CODES}\n{IMAGE}": metrics["accuracy"]}

    scope: dict[str, Any] = {"inner": noisy}
    exec(compile(source, f"{SCRIPT}.py", "exec"), scope)
    data = type(f"{SCRIPT}Samples", (victim.NoisySamples,), {})()
    stream = io.StringIO()
    job = Job(model=victim.Net(), loss=scope["loss"], data=data, eval_data=data, name=f"{SCRIPT}{CODES}")
    settings = TrainSettings(device="cpu", batch_size=8, epochs=2, residency="none")
    train(job, settings, out, screen=TrainingScreen(out, stream=stream, sampled=False))
    return out, stream.getvalue()


def test_the_page_of_a_training_shows_names_as_names(trained: tuple[Path, str]) -> None:
    """Seen to fail: without `html.escape` in report/markup.py the page has more scripts than its own."""
    out, _ = trained
    page = Elements((out / "report.html").read_text(encoding="utf-8"))
    tags = [tag for tag, _ in page.found]
    assert tags.count("script") == 1, "the page's own"
    assert "img" not in tags
    assert SCRIPT in page.text
    assert "\x1b" not in page.text
    policies = [at["content"] for tag, at in page.found if tag == "meta" and at.get("http-equiv")]
    assert len(policies) == 1
    assert "default-src 'none'" in (policies[0] or "")
    elsewhere = re.compile(r"^(https?:)?//")
    assert not [at for _, at in page.found for name in ("src", "href") if elsewhere.match(at.get(name) or "")]
    assert not [name for _, at in page.found for name in at if name.startswith("on")]


def test_the_terminal_of_a_training_gets_no_codes(trained: tuple[Path, str]) -> None:
    """Seen to fail: without `clean` in `Terminal.line` the screen is wiped by a metric's name."""
    _, told = trained
    assert SCRIPT in told
    assert "\x1b" not in told
    assert "\x07" not in told
    assert "\u202e" not in told
    assert next(line for line in told.splitlines() if IMAGE in line).startswith("Epoch 1/2: "), "one line, as it was"


def test_a_metric_with_a_line_break_stays_one_column(trained: tuple[Path, str]) -> None:
    out, _ = trained
    with (out / "metrics.csv").open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    assert all(len(row) == len(header) for row in rows)
    assert len(rows) == 2
