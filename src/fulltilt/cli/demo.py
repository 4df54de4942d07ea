"""`fulltilt demo`: a starved job explained, then tuned while it trains."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fulltilt import store
from fulltilt.cli.streams import wrapped
from fulltilt.figures import clean, number, percent, times
from fulltilt.report.console import open_console

STARVED_JOB = Path(__file__).with_name("starved_job.py")
EPOCHS = 2
# On two cores live tuning tries four or five settings on it, in less than a minute.
TUNED_EPOCHS = 12


EXAMPLES = ("fulltilt demo", "fulltilt demo --out /tmp/demo")


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the script and the runs.")] = Path(
        "fulltilt-runs/demo"
    ),
) -> None:
    """See a slow training job explained and made faster.

    Runs a small script, says why it is slow, then tunes it while it trains. Less than three minutes on two
    CPU cores; needs no GPU.
    """
    script = out / "train.py"
    folder = store.OwnedFolder.claim(out, "demo")
    folder.write(folder.check("train.py"), STARVED_JOB.read_bytes())
    steps = Steps(open_console())

    plain, tuned = out / "1-starved", out / "2-tuned"
    steps.say(f"1. {script} trains a small model. Why is it not faster?")
    weights = steps.fulltilt("run", "--out", plain, script, "--epochs", EPOCHS)
    steps.verdict(plain)

    steps.say("2. The same script, unchanged; Fulltilt measures while it trains how many workers are best here.")
    tuned_weights = steps.fulltilt("run", "--auto", "--out", tuned, script, "--epochs", TUNED_EPOCHS)
    steps.compare(tuned, _hashes(weights), _hashes(tuned_weights))

    steps.fulltilt("report", "--html", out / "before-after.html", plain, tuned, quietly=True)
    steps.tell(f"Pages: {plain / store.REPORT_FILE}, {out / 'before-after.html'}")
    steps.say(f"Now yours: {_our_command()} run train.py")


def _our_command() -> str:
    """What to type to start this program, also where its environment is not activated (`make demo`)."""
    if shutil.which("fulltilt"):
        return "fulltilt"
    return "python -m fulltilt" if sys.argv[0].endswith("__main__.py") else sys.argv[0]


class Steps:
    """Runs the steps of the demo and prints a few lines for each; on a terminal, a status line while one runs."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, line: str) -> None:
        """Print a heading."""
        self._console.print(Text(line, style="bold"))

    def tell(self, text: str) -> None:
        """Print what a step found, indented."""
        for row in wrapped(f"   {clean(text)}", self._console.width):
            self._console.print(Text(row), soft_wrap=True)

    def fulltilt(self, *arguments: object, quietly: bool = False) -> list[str]:
        """Run a command as the user would type it; returns what it printed. If it fails, so does the demo."""
        words = [str(argument) for argument in arguments]
        if not quietly:
            self._console.print(Text(f"   $ fulltilt {' '.join(words)}", style="cyan"), soft_wrap=True)
        command = [sys.executable, "-m", "fulltilt", *words]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8", errors="replace"
        )
        printed: list[str] = []
        with self._console.status("starting") as status:
            while True:
                try:
                    for line in process.stdout or ():
                        printed.append(line.rstrip())
                        if line.startswith("epoch") and line[5:].strip()[:1].isdigit():  # no row of a report
                            status.update(Text(clean(line.strip()), no_wrap=True, overflow="ellipsis"))
                    code = process.wait()
                    break
                except KeyboardInterrupt:  # the command gets it too, and ends in order
                    continue
        if code:
            print("\n".join(printed[-20:]), file=sys.stderr)
            raise typer.Exit(code if code > 0 else 128 - code)
        return printed

    def verdict(self, folder: Path) -> None:
        """Print the verdict and the first fix."""
        from fulltilt.diagnosis import answer

        diagnosis = answer(store.load(folder))
        self.tell(diagnosis.verdict.sentence)
        if diagnosis.findings:
            self.tell(f"→ {diagnosis.findings[0].fix}")

    def compare(self, tuned: Path, before: list[str], after: list[str]) -> None:
        """Print before and after, as live tuning measured them in one job, and whether the weights are the same."""
        live = next((live for rank in store.load(tuned).ranks for live in rank.live), None)
        if live is None or not live.before_batches_per_s or not live.batches_per_s:
            self.tell("Live tuning could not measure the job: this machine is too busy.")
            return
        table = Table("", "workers", "batches/s", "data wait", box=None, padding=(0, 3, 0, 0))
        rows = (
            ("before", live.before, live.before_batches_per_s, live.before_wait_share),
            ("after", live.settings, live.batches_per_s, live.wait_share),
        )
        for name, settings, rate, wait in rows:
            table.add_row(f"   {name}", str(settings.num_workers or 0), number(rate), percent(wait))
        self._console.print(table)
        same = "the same, bit for bit" if before and before == after else "NOT the same"
        gain = times(live.batches_per_s / live.before_batches_per_s)
        self.tell(f"{gain} as fast; the weights after epochs 1 to {EPOCHS} are {same}.")


def _hashes(printed: list[str]) -> list[str]:
    """The hashes of the weights that the script printed after the epochs that both runs have."""
    found = [match[1] for line in printed if (match := re.match(r"epoch \d+: .* weights (\w+)", line))]
    return found[:EPOCHS]
