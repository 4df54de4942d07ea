"""The pictures of the documents, made by the program: `make pictures`, or `make pictures FOLDER=fulltilt-runs/…`.

Without a run, the demo's script is run first. The terminal's pictures are SVG files of rich, the page's are taken in
Chromium. All show the run that is named in `about.txt` beside them.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME, TerminalTheme
from rich.text import Text
from tests.report.browser import browser

from fulltilt import store
from fulltilt.cli.demo import STARVED_JOB
from fulltilt.cli.streams import wrapped
from fulltilt.diagnosis import answer
from fulltilt.figures import cpus
from fulltilt.report import page, terminal
from fulltilt.report.run_view import Reported

HERE = Path(__file__).parent

HERE = Path(__file__).parent
LIGHT = TerminalTheme(
    (255, 255, 255),
    (36, 41, 47),
    [
        (36, 41, 47),
        (207, 34, 46),
        (17, 99, 41),
        (154, 103, 0),
        (9, 105, 218),
        (130, 80, 223),
        (27, 124, 131),
        (87, 96, 106),
    ],
)
THEMES = {"dark": SVG_EXPORT_THEME, "light": LIGHT}
# Enough to see what it is about; the rest of a page scrolls.
PAGE_HEIGHT = 1500


def main() -> None:
    """Make them all, from the run that is named or from one of the demo's script."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(sys.argv[1]) if sys.argv[1:] and sys.argv[1] else run_starved_job(Path(scratch))
        run = store.load(folder)
        shown: Reported = (run, answer(run))
        for name, theme in THEMES.items():
            draw(f"verdict-{name}", 100, theme, shown, in_full=False)
            draw(f"report-{name}", 100, theme, shown, in_full=True)
        draw("verdict-80", 80, THEMES["dark"], shown, in_full=False)
        draw("report-80", 80, THEMES["dark"], shown, in_full=True)
        photograph(Path(scratch) / "page.html", shown)
    machine = run.run.machine
    about = f"{run.run.started_at[:10]}, fulltilt {run.run.fulltilt}, torch {machine.torch}"
    gpus = ", ".join(gpu.name for gpu in machine.gpus) or "no GPU"
    (HERE / "about.txt").write_text(f"{about}, {cpus(machine.cpu.usable)}, {gpus}\n")


def run_starved_job(scratch: Path) -> Path:
    """The demo's script, run as a user's own."""
    (scratch / "train.py").write_bytes(STARVED_JOB.read_bytes())
    command = [sys.executable, "-m", "fulltilt", "run", "--out", "run", "train.py", "--epochs", "8"]
    subprocess.run(command, cwd=scratch, check=True)
    return scratch / "run"


def draw(name: str, columns: int, theme: TerminalTheme, shown: Reported, *, in_full: bool) -> None:
    """What a terminal of this width shows of a run: the end of `fulltilt run`, or `fulltilt report`."""
    quiet = io.StringIO()
    console = Console(
        record=True, width=columns, file=quiet, force_terminal=True, color_system="truecolor", highlight=False
    )
    run, diagnosis = shown
    if in_full:
        console.print(Text("$ fulltilt report", style="bold"))
        terminal.show(console, [shown])
    else:
        console.print(Text(f"$ fulltilt run {' '.join(run.run.command)}", style="bold"))
        console.print(Text("… the script's own output …\n", style="dim"))
        first, *rest = terminal.verdict_lines(
            diagnosis, f"fulltilt-runs/{run.run.started_at[:10].replace('-', '')}-train"
        )
        for line in (first, *rest):
            for row in wrapped(line, columns):
                console.print(Text(row, style="bold" if line is first else ""))
    drawn = console.export_svg(title="", theme=theme, unique_id=name)
    drawn = re.sub(r"\s*@font-face \{.*?\}", "", drawn, flags=re.DOTALL)  # a picture loads nothing
    (HERE / f"{name}.svg").write_text(re.sub(r"[ \t]+\n", "\n", drawn), encoding="utf-8")


def photograph(path: Path, shown: Reported) -> None:
    """The page, light and dark, and on a phone."""
    page.write(path, [shown])
    with browser() as opened:
        for name, width, dark, phone in (
            ("page-light", 1100, False, False),
            ("page-dark", 1100, True, False),
            ("page-phone", 390, False, True),
        ):
            opened.screen(width, PAGE_HEIGHT, dark=dark, phone=phone)
            opened.open(path.as_uri())
            taken = Image.open(io.BytesIO(opened.picture(path.with_suffix(".png"))))
            shown_part = taken.crop((0, 0, taken.width, min(taken.height, PAGE_HEIGHT * (2 if phone else 1))))
            # Few colours: a tenth of the size, and no difference to be seen.
            shown_part.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(HERE / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
