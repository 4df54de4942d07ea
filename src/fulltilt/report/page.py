"""The page: one self-contained HTML file. It loads nothing, works from a file, and shows names as text.

The content security policy allows the one style sheet and the one script below by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path

from fulltilt import figures
from fulltilt.diagnosis.verdict import title
from fulltilt.records import Diagnosis, Run
from fulltilt.report import page_parts as parts
from fulltilt.report import page_surroundings as surroundings
from fulltilt.report import wording
from fulltilt.report.comparison import Reported, compare, told_apart
from fulltilt.report.markup import Child, Markup, element
from fulltilt.report.page_bars import (
    bucket_class,
    ledger_bar,
    ledger_table,
    phase_class,
    speed_bars,
    step_lanes,
)
from fulltilt.report.page_time import chart_grid, machine_charts, step_charts
from fulltilt.report.palette import BUCKET_TINTS, PHASE_TINTS, bucket_order
from fulltilt.report.step import step_picture
from fulltilt.store import write_text

# Tells a page of ours from a file that somebody else has under the same name.
SIGNATURE = b'name="generator" content="Fulltilt"'


def write(path: Path, runs: Sequence[Reported]) -> None:
    """Write the page of one run, or of several side by side, atomically. Raises RunFolderError."""
    write_text(path, render(runs), signature=SIGNATURE)


def render(runs: Sequence[Reported]) -> str:
    """The page as text."""
    (first, diagnosis), *others = runs
    if others:
        title, body = f"{len(runs)} runs side by side", _comparison(runs)
    else:
        title, body = first.run.name, _one_run(first, diagnosis)
    return _document(f"{title} · Fulltilt", body, fulltilt=first.run.fulltilt)


# --------------------------------------------------------------------------- one run


def _one_run(run: Run, diagnosis: Diagnosis) -> list[Child]:
    return [_verdict(run, diagnosis), *_sections(run, diagnosis)]


def _verdict(run: Run, diagnosis: Diagnosis) -> Markup:
    record, verdict = run.run, diagnosis.verdict
    severity = diagnosis.findings[0].severity if diagnosis.findings else "info"
    running = element("p", wording.NO_END_YET, class_="running")
    invalid = diagnosis.invalid_because
    return element(
        "header",
        element("p", title(verdict.code), class_=f"eyebrow {severity}"),
        element("h1", wording.glued(verdict.sentence)),
        running if record.state == "running" else None,
        element("p", wording.not_valid(invalid), class_="running") if invalid is not None else None,
        element("dl", _key_figures(diagnosis), class_="tiles"),
        speed_bars(diagnosis.throughput, diagnosis.ceilings),
        element(
            "p",
            element("b", record.name),
            element("code", shlex.join(record.command)),
            element("span", record.started_at),
            element("span", wording.ended(record)),
            class_="identity",
        ),
        class_="verdict",
    )


def _key_figures(diagnosis: Diagnosis) -> list[Markup]:
    speed, gpus = diagnosis.throughput, diagnosis.gpu
    facts = [
        ("samples/s", figures.number(speed.samples_per_s)),
        ("GPU use", figures.pct_range([gpu.util_pct for gpu in gpus])),
        ("SM active", figures.pct_range([gpu.sm_active_pct for gpu in gpus])),
        ("steps", figures.whole(speed.steps)),
        ("wall time", figures.seconds(diagnosis.ledger.wall_s)),
    ]
    known = [(name, figure) for name, figure in facts if figure != figures.NOT_MEASURED]
    return [element("div", element("dt", name), element("dd", figure)) for name, figure in known]


def _sections(run: Run, diagnosis: Diagnosis) -> list[Child]:
    rank = run.ranks[0] if run.ranks else None
    picture = step_picture(run, diagnosis)
    order = bucket_order(diagnosis.ledger)
    of_rank = f", of rank {rank.rank}" if rank is not None and len(run.ranks) > 1 else ""
    steps, machine = step_charts(run, diagnosis), machine_charts(run, diagnosis)
    return [
        parts.section(
            "Where the time went",
            ledger_bar(diagnosis.ledger.buckets, order) if order else None,
            ledger_table(diagnosis.ledger, order) if order else None,
            note=figures.seconds(diagnosis.ledger.wall_s),
        ),
        parts.section("What to change", parts.finding_cards(diagnosis.findings), note="in order of what it would win"),
        parts.section(
            "One step, to scale",
            step_lanes(picture) if picture else None,
            note=f"{figures.seconds(picture.step_s)}, mean of {figures.whole(picture.steps)} steps{of_rank}"
            if picture
            else None,
        ),
        parts.section("Ranks", parts.rank_bars(diagnosis), note="where each rank's time went"),
        parts.section("Over time", chart_grid(steps, wide=True) if steps else None),
        parts.section(
            "The machine",
            parts.gpu_table(diagnosis.gpu),
            element("p", USE_IS_NOT_WORK, class_="aside") if diagnosis.gpu else None,
            chart_grid(machine) if machine else None,
        ),
        parts.section("Lines that cost the time", parts.hot_lines(rank) if rank else None),
        parts.section("Checklist", parts.checklist(diagnosis.checklist)),
        parts.section("Settings and surroundings", _surroundings(run, diagnosis)),
        parts.section("Notes", parts.notes(run, diagnosis)),
    ]


USE_IS_NOT_WORK = (
    "“Use” only says that some kernel ran. SM active says how much of the GPU it kept busy: "
    "where the two are far apart, 100 % use is not full speed."
)


def _surroundings(run: Run, diagnosis: Diagnosis) -> Markup:
    rank = run.ranks[0] if run.ranks else None
    return element(
        "div",
        surroundings.settings(diagnosis),
        [surroundings.loaders(rank), surroundings.deep_look(rank)] if rank else None,
        surroundings.machine(run.run.machine),
        class_="surroundings",
    )


# --------------------------------------------------------------------------- several runs


def _comparison(runs: Sequence[Reported]) -> list[Child]:
    names = told_apart(runs)
    pictures = [step_picture(run, diagnosis) for run, diagnosis in runs]
    scale_s = max((picture.scale_s for picture in pictures if picture is not None), default=None)
    ledgers: list[Child] = []
    steps: list[Child] = []
    for name, (_, diagnosis), picture in zip(names, runs, pictures, strict=True):
        heading = element("h3", name, element("small", figures.seconds(diagnosis.ledger.wall_s)))
        bar = ledger_bar(diagnosis.ledger.buckets, bucket_order(diagnosis.ledger))
        ledgers.append(
            element("div", heading, bar, element("p", wording.glued(diagnosis.verdict.sentence)), class_="beside")
        )
        if picture is not None:
            heading = element("h3", name, element("small", figures.seconds(picture.step_s)))
            steps.append(element("div", heading, step_lanes(picture, scale_s), class_="beside"))
    return [
        element(
            "header",
            element("p", "Comparison", class_="eyebrow info"),
            element("h1", f"{len(runs)} runs side by side"),
            element("dl", _speeds(names, runs), class_="tiles"),
            class_="verdict",
        ),
        parts.section("Settings and what came of them", parts.comparison_table(compare(runs), names)),
        parts.section("Where the time went", ledgers),
        parts.section("One step, to one scale", steps),
        parts.section("Each run", [_folded(name, *run) for name, run in zip(names, runs, strict=True)]),
    ]


def _speeds(names: Sequence[str], runs: Sequence[Reported]) -> list[Markup]:
    rates = [diagnosis.throughput.samples_per_s for _, diagnosis in runs]
    return [
        element("div", element("dt", f"samples/s, {name}"), element("dd", figures.number(rate)))
        for name, rate in zip(names, rates, strict=True)
    ]


def _folded(name: str, run: Run, diagnosis: Diagnosis) -> Markup:
    return element("details", element("summary", name), _one_run(run, diagnosis), class_="run")


# --------------------------------------------------------------------------- the document


def _document(title: str, body: Sequence[Child], fulltilt: str) -> str:
    style, script = _style(), _resource("page.js")
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="generator", content="Fulltilt"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="referrer", content="no-referrer"),
        element("title", title),
        element("style", Markup(style)),
    )
    theme = element("button", "Light / dark", type="button", id="theme", hidden=True)
    top = element("div", element("span", "fulltilt", class_="brand"), theme, class_="top")
    foot = element("footer", f"Written by Fulltilt {fulltilt}. This page loads nothing from anywhere.")
    content = element("body", top, element("main", body), foot, element("script", Markup(script)))
    return f"<!doctype html>\n{element('html', head, content, lang='en')}\n"


@cache
def _style() -> str:
    """The style sheet, with the palette's colours, so that they are the terminal's."""
    tints = [(bucket_class(name), tint) for name, tint in BUCKET_TINTS.items()]
    tints += [(phase_class(kind), tint) for kind, tint in PHASE_TINTS.items()]
    rules = [f".{name}{{fill:{tint.colour}}}.t-{name}{{fill:{tint.ink}}}" for name, tint in tints]
    return "".join([*rules, "\n", _resource("page.css")])


@cache
def _resource(name: str) -> str:
    return resources.files("fulltilt.report").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
