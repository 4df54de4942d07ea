"""The page in a real Chromium: it opens from a file, asks for nothing, and reads well on a desk and on a phone."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fulltilt.report import page
from tests.report import examples
from tests.report.browser import Browser, NoBrowser, browser

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

PAGES = {
    "starved": ["starved"],
    "hostile": ["hostile"],
    "straggler": ["straggler"],
    "cpu_only": ["cpu_only"],
    "crashed": ["crashed"],
    "comparison": ["starved", "healthy", "hostile"],
}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    try:
        with browser() as opened:
            opened.open("data:,")  # leaves the browser's own start page
            opened.requests()
            opened.console()
            yield opened
    except NoBrowser as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    for name, runs in PAGES.items():
        page.write(folder / f"{name}.html", [getattr(examples, run)() for run in runs])
    return folder


@pytest.mark.parametrize("name", PAGES)
def test_it_opens_from_a_file_without_errors_or_requests(chromium, folder, name):
    url = (folder / f"{name}.html").as_uri()
    chromium.screen(1120)
    chromium.open(url)
    assert chromium.alert() is None
    assert chromium.is_loaded()
    assert chromium.console() == []
    assert chromium.requests() == [url]


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", [360, 768, 1400])
@pytest.mark.slow
def test_it_never_scrolls_sideways(chromium, folder, name, width):
    chromium.screen(width, phone=width < 500)
    chromium.open((folder / f"{name}.html").as_uri())
    chromium.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    wide, inner = chromium.run("return [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide <= inner <= width


def test_a_hostile_name_shows_as_text(chromium, folder):
    chromium.screen(1120)
    chromium.open((folder / "hostile.html").as_uri())
    assert chromium.alert() is None
    assert chromium.run("return document.scripts.length") == 1
    assert examples.HOSTILE in chromium.run("return document.querySelector('h1').innerText")
    assert examples.HOSTILE in chromium.run("return document.title")


def test_the_policy_stops_what_escaping_would_have_missed(chromium, folder):
    chromium.open((folder / "starved.html").as_uri())
    chromium.run(
        "const s = document.createElement('script'); s.textContent = 'window.broken = 1'; document.body.append(s);"
        "const i = new Image(); i.src = 'http://127.0.0.1:9/x.png'; document.body.append(i);"
    )
    assert chromium.run("return window.broken ?? null") is None
    refused = [message for message in chromium.console() if "Content Security Policy" in message]
    assert len(refused) == 2
    assert any("http://127.0.0.1:9/x.png" in message for message in refused)
    chromium.requests()


def test_charts_and_bars_have_a_size(chromium, folder):
    for width in (360, 1120):
        chromium.screen(width, phone=width < 500)
        chromium.open((folder / "starved.html").as_uri())
        sizes = chromium.run(
            "return [...document.querySelectorAll('.plot, .bar')].map(e => e.getBoundingClientRect())"
            ".map(r => [r.width, r.height])"
        )
        assert len(sizes) > 10
        assert all(w > 100 and h > 10 for w, h in sizes)
        drawn = chromium.run(
            "return [...document.querySelectorAll('.stroke, .area')].map(e => e.getBoundingClientRect().width)"
        )
        assert len(drawn) > 15
        assert all(w > 0 for w in drawn)


def test_light_and_dark_differ_and_the_switch_overrides(chromium, folder):
    ground = "return getComputedStyle(document.body).backgroundColor"
    url = (folder / "starved.html").as_uri()
    seen = {}
    for dark in (False, True):
        chromium.screen(1120, dark=dark)
        chromium.open(url)
        seen[dark] = chromium.run(ground)
    assert seen[False] != seen[True]
    chromium.run("document.getElementById('theme').click()")  # the reader's system is dark, this page is not
    assert chromium.run(ground) == seen[False]
    chromium.open(url)
    assert chromium.run(ground) == seen[False], "the choice is remembered"
    chromium.run("localStorage.clear()")


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_from_its_ground(chromium, folder, dark):
    chromium.screen(1120, dark=dark)
    chromium.open((folder / "starved.html").as_uri())
    faint = chromium.run(
        """
        const channels = c => c.match(/[\\d.]+/g).map(Number);
        const light = c => { const [r, g, b] = channels(c).map(v => v / 255)
          .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b };
        const ground = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
          const p = channels(c); if (p.length < 4 || p[3] > 0) return c; } return 'rgb(255,255,255)' };
        const faint = [];
        for (const e of document.querySelectorAll('main *:not(svg *), footer')) {
          if (![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())) continue;
          const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => y - x);
          if ((a + .05) / (b + .05) < 4.5) faint.push(e.outerHTML.slice(0, 90));
        }
        return faint;
        """
    )
    assert faint == []


def test_pointing_at_a_chart_reads_its_values(chromium, folder):
    chromium.screen(1120)
    chromium.open((folder / "starved.html").as_uri())
    readings = chromium.run(
        """
        return [...document.querySelectorAll('.chart')].map(figure => {
          const plot = figure.querySelector('.plot'), box = plot.getBoundingClientRect();
          plot.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + box.width * .5}));
          return figure.querySelector('.reading').innerText;
        })
        """
    )
    assert readings[0].startswith("2 min 5 s")
    assert "samples/s" in readings[0]
    assert 100 < float(readings[0].split("·")[1].split()[0]) < 160
    assert "data wait" in readings[2]
    assert chromium.console() == []


def test_printing_is_light_and_hides_the_switch(chromium, folder):
    chromium.screen(1120, dark=True)
    chromium.open((folder / "starved.html").as_uri())
    chromium.devtools("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        assert chromium.run("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert chromium.run("return document.getElementById('theme').offsetWidth") == 0
    finally:
        chromium.devtools("Emulation.setEmulatedMedia", {"media": ""})
