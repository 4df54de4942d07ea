"""The page: one self-contained HTML file that loads nothing.

Its content security policy allows one style sheet and one script, by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from pathlib import Path

from fulltilt import figures
from fulltilt.diagnosis.verdict import title
from fulltilt.records import CheckLine, Diagnosis, Finding, LoaderRecord, Machine, RankRecord, Run
from fulltilt.report import run_view
from fulltilt.report.legend import BUCKET_LEGEND, PHASE_LEGEND, bucket_order
from fulltilt.report.markup import Child, Markup, element
from fulltilt.report.page_charts import (
    bucket_class,
    chart_grid,
    ledger_bar,
    ledger_table,
    machine_charts,
    phase_class,
    step_charts,
    step_lanes,
)
from fulltilt.report.run_view import Reported, compare, distinct_names, step_picture, used_loaders
from fulltilt.store import write_text

# --------------------------------------------------------------------------- parts

MOST_LINES = 8
STATES = {"ok": "passed", "warn": "warning", "fail": "failed", "skip": "skipped"}


def _section(title: str, *content: Child, note: str | None = None) -> Markup | None:
    """A section with its heading; None when it has no content."""
    shown = [child for child in content if child]
    if not shown:
        return None
    heading = element("h2", title, element("small", note) if note else None)
    return element("section", heading, shown)


def _listing(tag: str, items: Sequence[Markup], class_: str) -> Markup | None:
    """A list of ``<li>``; None when it is empty."""
    return element(tag, items, class_=class_) if items else None


def _finding_card(finding: Finding) -> Markup:
    gain = figures.speedup(finding.predicted_speedup)
    facts: list[Child] = [
        element("span", finding.severity, class_=f"pill {finding.severity}"),
        element("span", run_view.after_startup(finding)),
        element("code", finding.code),
        element("code", finding.where, class_="where") if finding.where else None,
    ]
    return element(
        "li",
        element("h3", finding.title),
        element("p", gain, class_="gain") if gain else None,
        element("p", facts, class_="facts"),
        element("ul", [element("li", line) for line in finding.evidence]) if finding.evidence else None,
        element("p", finding.fix, class_="fix"),
        class_=f"card {finding.severity}",
    )


def _hot_lines(rank: RankRecord) -> list[Markup]:
    tables = []
    for name, lines in run_view.hot_lines(rank, MOST_LINES):
        rows = []
        for figure, line in lines:
            place: Child = element("code", line.function)  # a kernel has no line of its own
            if line.where:
                place = ["in ", line.function, ", ", element("code", line.where, class_="where")]
            call = element("code", figures.brief(line.call, 100), class_="call") if line.call else None
            rows.append(element("tr", element("td", figure, class_="figure"), element("td", place, call)))
        tables.append(element("div", element("h3", name), element("table", element("tbody", rows), class_="lines")))
    return tables


# --------------------------------------------------------------------------- ranks and GPUs


def _rank_bars(diagnosis: Diagnosis) -> Markup | None:
    if len(diagnosis.ranks) < 2:
        return None
    order = bucket_order(diagnosis.ledger)
    shown, remark = run_view.shown_ranks(diagnosis)
    rows = []
    for rank in shown:
        name = element("span", run_view.rank_name(rank, diagnosis), class_="speed-name")
        wait = element("b", "slowest") if rank.slowest else f"waits {figures.seconds(rank.waits_s)}"
        bar = ledger_bar(rank.buckets, order, height=22)
        rows.append(element("div", name, bar, element("span", wait, class_="speed-rate"), class_="speed-row"))
    return element("div", rows, element("p", remark, class_="aside") if remark else None, class_="speeds")


def _figure_table(
    name: str,
    corner: str,
    columns: Sequence[str],
    rows: Iterable[tuple[str, Sequence[str], str | None]],
    class_: str | None = None,
) -> Markup:
    """Rows of figures (heading, cells, style class) in a frame that scrolls by itself."""
    head = [element("th", column, class_="figure", scope="col") for column in columns]
    body = []
    for heading, cells, row_class in rows:
        figures_of_row = [element("td", cell, class_="figure") for cell in cells]
        body.append(element("tr", element("th", heading, scope="row"), figures_of_row, class_=row_class))
    top = element("tr", element("th", corner, scope="col") if corner else element("td"), head)
    table = element("table", element("thead", top), element("tbody", body), class_=class_)
    return element("div", table, class_="scrolling", tabindex="0", role="region", aria_label=name)


def _check_line(line: CheckLine) -> Markup:
    remedy = element("small", line.remedy) if line.remedy else None
    return element(
        "li",
        element("span", STATES[line.state], class_=f"pill {line.state}"),
        element("div", element("span", element("b", line.name), " ", line.figure), remedy),
    )


# --------------------------------------------------------------------------- machine and loaders


def _definitions(name: str, pairs: Iterable[tuple[str, str | None]]) -> Markup | None:
    """Names with their values, without unknown ones."""
    known = [(term, value) for term, value in pairs if value not in (None, "", figures.NOT_MEASURED)]
    if not known:
        return None
    items = [element("div", element("dt", term), element("dd", value)) for term, value in known]
    return element("div", element("h3", name), element("dl", items))


_USES = {"train": "training", "eval": "evaluation", "unused": "nothing"}


def _loader_facts(loader: LoaderRecord) -> Markup | None:
    facts = [
        ("made at", loader.where),
        ("data set", loader.dataset),
        ("samples in it", None if loader.dataset_len is None else figures.whole(loader.dataset_len)),
        ("workers", str(loader.num_workers)),
        ("batches", figures.whole(loader.batches)),
        ("batch", figures.size(loader.batch_bytes)),
        ("start method", loader.start_method),
        ("data wait", figures.seconds(loader.wait_s)),
        ("epoch restarts", figures.seconds(loader.restart_s)),
    ]
    return _definitions(f"Loader for {_USES[loader.role]}", facts)


def _machine(machine: Machine) -> Markup | None:
    facts = [
        ("host", machine.hostname),
        ("system", machine.platform),
        ("CPUs", f"{machine.cpu.usable:g} usable of {machine.cpu.present}"),
        ("memory", figures.size(machine.mem_limit_bytes or machine.mem_total_bytes)),
        ("/dev/shm", figures.size(machine.shm_total_bytes)),
        ("GPU", ", ".join(gpu.name for gpu in machine.gpus) or machine.why_no_gpu),
        *((name, getattr(machine, name.lower())) for name in ("driver", "Python", "torch", "CUDA")),
    ]
    return _definitions("Machine", facts)


# --------------------------------------------------------------------------- page

# Marks our pages: another file of the same name is not replaced.
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
    record, verdict, invalid = run.run, diagnosis.verdict, diagnosis.invalid_because
    severity = diagnosis.findings[0].severity if diagnosis.findings else "info"
    cause = diagnosis.findings[0].title if diagnosis.findings else title(verdict.code)
    identity = (
        element("b", record.name),
        element("code", shlex.join(record.command)),
        element("span", record.started_at),
        element("span", run_view.ended(record)),
    )
    return element(
        "header",
        element("p", cause, class_=f"eyebrow {severity}"),
        element("h1", verdict.sentence),
        element("p", run_view.NO_END_YET, class_="running") if record.state == "running" else None,
        element("p", run_view.not_valid(invalid), class_="running") if invalid is not None else None,
        element("dl", _key_figures(diagnosis), class_="tiles"),
        element("p", identity, class_="identity"),
        class_="verdict",
    )


_RATES = ("samples/s", "loader ceiling, samples/s", "compute ceiling, samples/s")
_TILES = (*_RATES, "GPU use", "SM active", "steps", "wall time")


def _key_figures(diagnosis: Diagnosis) -> list[Markup]:
    tiles = [(name.partition(",")[0], run_view.RUN_FIGURES[name](diagnosis)) for name in _TILES]
    known = [(name, figure) for name, figure in tiles if figure != figures.NOT_MEASURED]
    return [element("div", element("dt", name), element("dd", figure)) for name, figure in known]


def _sections(run: Run, diagnosis: Diagnosis) -> list[Child]:
    rank = run.ranks[0] if run.ranks else None
    picture = step_picture(run, diagnosis)
    order = bucket_order(diagnosis.ledger)
    of_rank = f", of rank {rank.rank}" if rank is not None and len(run.ranks) > 1 else ""
    mean = (
        f"{figures.seconds(picture.step_s)}, mean of {figures.whole(picture.steps)} steps{of_rank}" if picture else ""
    )
    more = (run_view.utilisation_line(diagnosis), run_view.job_line(diagnosis), run_view.compile_line(run))
    cards = [_finding_card(finding) for finding in diagnosis.findings]
    notes = [element("li", line) for line in run_view.notes(run, diagnosis)]
    cells = run_view.GPU_FIGURES
    gpus = [(f"{gpu.index} {gpu.name}", [cell(gpu) for cell in cells.values()], None) for gpu in diagnosis.gpu]
    return [
        _section(
            "Where the time went",
            ledger_bar(diagnosis.ledger.buckets, order) if order else None,
            ledger_table((run, diagnosis), order) if order else None,
            *(element("p", line, class_="aside") for line in more if line),
            note=f"of {figures.seconds(diagnosis.ledger.wall_s)} of wall time",
        ),
        _section("What to change", _listing("ol", cards, "findings"), note="largest gain first"),
        _section("One step, to scale", step_lanes(picture), note=mean) if picture else None,
        _section("Ranks", _rank_bars(diagnosis), note="where each rank's time went"),
        _section("Over time", chart_grid(step_charts(run, diagnosis), wide=True)),
        _section(
            "The machine",
            _figure_table("GPUs", "GPU", tuple(cells), gpus) if gpus else None,
            element("p", USE_IS_NOT_WORK, class_="aside") if diagnosis.gpu else None,
            chart_grid(machine_charts(run, diagnosis)),
        ),
        _section("Lines that cost the time", _hot_lines(rank) if rank else None),
        _section("Checklist", _listing("ul", [_check_line(line) for line in diagnosis.checklist], "checklist")),
        _section("Settings and machine", _settings(run, diagnosis)),
        _section("Notes", _listing("ul", notes, "notes")),
    ]


USE_IS_NOT_WORK = (
    "“Use” is the time with any kernel running, SM active how much of the GPU was busy: "
    "where the two differ a lot, 100 % use is not full speed."
)


def _settings(run: Run, diagnosis: Diagnosis) -> Markup:
    rank = run.ranks[0] if run.ranks else None
    return element(
        "div",
        _definitions("Settings", ((name, run_view.setting(value)) for name, value in diagnosis.settings)),
        [_loader_facts(loader) for loader, _ in used_loaders(rank)] if rank else None,
        _definitions("A step under the profiler", run_view.deep_facts(rank.deep)) if rank and rank.deep else None,
        _machine(run.run.machine),
        class_="settings",
    )


# --------------------------------------------------------------------------- several runs


def _comparison(runs: Sequence[Reported]) -> list[Child]:
    names = distinct_names(runs)
    pictures = [step_picture(run, diagnosis) for run, diagnosis in runs]
    scale_s = max((picture.scale_s for picture in pictures if picture is not None), default=None)
    ledgers: list[Child] = []
    steps: list[Child] = []
    for name, (_, diagnosis), picture in zip(names, runs, pictures, strict=True):
        heading = element("h3", name, element("small", figures.seconds(diagnosis.ledger.wall_s)))
        bar = ledger_bar(diagnosis.ledger.buckets, bucket_order(diagnosis.ledger))
        ledgers.append(element("div", heading, bar, element("p", diagnosis.verdict.sentence), class_="beside"))
        if picture is not None:
            heading = element("h3", name, element("small", figures.seconds(picture.step_s)))
            steps.append(element("div", heading, step_lanes(picture, scale_s), class_="beside"))
    # Rows in which the runs differ stand out.
    rows = [(row.name, row.cells, "differs" if row.differs else None) for row in compare(runs)]
    folded = [
        element("details", element("summary", name), _one_run(*run), class_="run")
        for name, run in zip(names, runs, strict=True)
    ]
    eyebrow, title = element("p", "Comparison", class_="eyebrow info"), f"{len(runs)} runs side by side"
    return [
        element("header", eyebrow, element("h1", title), class_="verdict"),
        _section("Settings and results", _figure_table("Comparison of the runs", "", names, rows, "comparison")),
        _section("Where the time went", ledgers),
        _section("One step, to one scale", steps),
        _section("Each run", folded),
    ]


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
    """The style sheet, with the same colours as the terminal."""
    entries = [(bucket_class(name), entry) for name, entry in BUCKET_LEGEND.items()]
    entries += [(phase_class(phase), entry) for phase, entry in PHASE_LEGEND.items()]
    rules = [f".{name}{{fill:{entry.colour}}}.t-{name}{{fill:{entry.ink}}}" for name, entry in entries]
    return "".join([*rules, "\n", _resource("page.css")])


@cache
def _resource(name: str) -> str:
    return resources.files("fulltilt.report").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
