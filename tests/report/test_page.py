"""The page as text: self-contained, locked down, escaped, small."""

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from fulltilt.report import page
from tests.report import examples

ALL = ["starved", "healthy", "cpu_only", "crashed", "straggler", "running", "hostile"]
EMPTY = {"meta", "rect", "path", "line"}


class Outline(HTMLParser):
    """Checks that elements are closed in order, and keeps what a reader would see."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.blocks: dict[str, str] = {}
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in EMPTY:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("style", "script"):
            self.blocks[self.open[-1]] = self.blocks.get(self.open[-1], "") + data
        else:
            self.text += data


def outline(*names: str) -> Outline:
    seen = Outline()
    seen.feed(page.render([getattr(examples, name)() for name in names]))
    seen.close()
    assert seen.open == []
    return seen


@pytest.mark.parametrize("names", [*ALL, "starved+healthy", "starved+crashed+straggler", "hostile+hostile"])
def test_the_page_is_well_formed_and_asks_for_nothing(names):
    seen = outline(*names.split("+"))
    assert seen.tags.count("script") == seen.tags.count("style") == 1
    names_used = {name for _, name, _ in seen.attributes}
    # No address to load from, and nothing that the policy would have to allow besides the two blocks.
    assert not names_used & {"src", "href", "srcset", "xlink:href", "style", "action", "data", "poster"}
    assert not any(name.startswith("on") for name in names_used)
    assert not set(seen.tags) & {"link", "iframe", "object", "embed", "img", "form", "base", "foreignobject"}
    assert "url(" not in seen.blocks["style"]
    assert "@import" not in seen.blocks["style"]


def test_the_policy_allows_exactly_the_two_blocks():
    seen = outline("starved")
    (policy,) = [v for tag, name, v in seen.attributes if tag == "meta" and name == "content" and "default-src" in v]

    def digest(text: str) -> str:
        return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"

    assert policy.split("; ") == [
        "default-src 'none'",
        f"style-src {digest(seen.blocks['style'])}",
        f"script-src {digest(seen.blocks['script'])}",
        "base-uri 'none'",
        "form-action 'none'",
    ]


def test_hostile_names_show_as_text():
    html = page.render([examples.hostile()])
    assert examples.HOSTILE not in html
    assert "\x1b" not in html
    html.encode()
    assert outline("hostile").text.count(examples.HOSTILE) > 15
    assert outline("hostile", "hostile").text.count(examples.HOSTILE) > 15


def test_the_page_says_it_all():
    text = outline("starved").text
    for part in (
        "Where the time went",
        "What to change",
        "One step, to scale",
        "Over time",
        "The machine",
        "Lines that cost the time",
        "Checklist",
        "Settings and machine",
        "in PhotoFolder.__getitem__, dataset.py:48",
        "2.6 to 3.1 × as fast",
        "raise num_workers 2 → 7 at train.py:31",
        "compute ceiling 413",
        "GPU 0 use",
        "CPUs used by the job",
        "Not judged: padding_waste. Missing: lengths.",
    ):
        assert part in text


def test_what_is_not_there_is_not_shown():
    text = outline("crashed").text
    assert "before its first training step" in text
    for part in ("One step", "Over time", "What to change", "Checklist", "Lines that cost"):
        assert part not in text
    assert "GPU 0" not in outline("cpu_only").text


def test_a_comparison_has_the_table_and_every_run():
    seen = outline("starved", "healthy")
    assert seen.tags.count("details") == 2
    for part in ("num_workers", "3.05 ×", "One step, to one scale"):
        assert part in seen.text


def test_shares_of_the_ledger_say_of_what_they_are():
    assert "of the wall timeafter start-up" in outline("starved").text


def test_every_picture_can_be_heard():
    seen = outline("starved", "straggler")
    pictures = sum(1 for tag, name, value in seen.attributes if (tag, name, value) == ("svg", "role", "img"))
    labels = [value for tag, name, value in seen.attributes if (tag, name) == ("svg", "aria-label")]
    assert pictures == len(labels) > 20
    assert all(len(label) > 10 for label in labels)
    assert any(label.startswith("Where the time went: data wait 58 %, compute 28 %") for label in labels)


def test_a_million_steps_stay_small():
    run, diagnosis = examples.starved()
    tape = examples.Tape()
    tape.outside(startup_s=5.0)
    for epoch in range(200):
        tape.steps(
            5000, batch=8, epoch=epoch, load_s=0.002, forward_s=0.001, backward_s=0.002, optimizer_s=0.001,
            gpu=True, fold=250,
        )  # fmt: skip
        tape.outside(epoch=epoch, validation_s=1.0)
    wall_s = tape.now_s
    samples = examples.samples_over(wall_s, util_pct=50, cpu_pct=300, gpus=8, every_s=2.0)
    ledger = examples.ledger_of(tape.spans)
    throughput = replace(diagnosis.throughput, steps=1_000_000)
    long = replace(run, spans=(tuple(tape.spans),), samples=samples)
    html = page.render([(long, replace(diagnosis, ledger=ledger, throughput=throughput))])
    assert len(html.encode()) < 400_000


def test_writing_replaces_the_page_whole(tmp_path):
    path = tmp_path / "report.html"
    page.write(path, [examples.starved()])
    first = path.read_text(encoding="utf-8")
    page.write(path, [examples.starved()])
    assert path.read_text(encoding="utf-8") == first
    assert re.match(r"<!doctype html>\n<html", first)
    assert list(tmp_path.iterdir()) == [path]
