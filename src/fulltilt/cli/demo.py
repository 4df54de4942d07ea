"""`fulltilt demo`: a starved job explained, then tuned while it trains, then a recipe trained."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from fulltilt.cli.streams import examples
from fulltilt.errors import MachineError

STARVED_JOB = Path(__file__).with_name("starved_job.py")
# On two cores live tuning tries five or six settings on it, in less than a minute.
TUNED_EPOCHS = 14
# Small enough for two cores, and still the whole recipe: both stages, experts, all measures.
TRAINED = {
    "backbone": "test_resnet",
    "img_size": 64,
    "decoder_width": 32,
    "epochs": 12,
    "stage1_epochs": 2,
    "batch_size": 16,
    "lr": 3e-3,
    "stage2_lr": 3e-3,
}


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("demo", epilog=examples("fulltilt demo", "fulltilt demo --out /tmp/demo"))(demo)


def demo(
    out: Annotated[Path, typer.Option(help="Where the script and the runs go.")] = Path("fulltilt-runs/demo"),
) -> None:
    """See a slow training job explained and made faster.

    Runs a small script, says why it is slow, tunes it while it trains, then trains a recipe.
    """
    script = _place_script(out)
    plain, tuned = out / "1-starved", out / "2-tuned"
    _announce(f"1. {script} trains a small model. Why is it not faster?")
    _fulltilt("run", "--out", plain, script)
    _announce("2. The same script, tuned while it trains.")
    _fulltilt("run", "--auto", "--out", tuned, script, "--epochs", str(TUNED_EPOCHS))
    _announce("Before and after; the weights after epochs 1 to 3 are the same.")
    _fulltilt("report", "--no-page", plain, tuned)
    _announce("3. A trainer that starts out fast: camouflaged objects on made pictures.")
    _train(out / "3-trained")


def _place_script(out: Path) -> Path:
    """The starved job as a script of the user's own, to read and to run again."""
    script = out / "train.py"
    try:
        out.mkdir(parents=True, exist_ok=True)
        script.write_bytes(STARVED_JOB.read_bytes())
    except OSError as error:
        remedy = "Choose another place with --out DIR."
        raise MachineError(f"cannot write {script}: {error.strerror}", remedy) from error
    return script


def _announce(line: str) -> None:
    typer.secho(f"\n{line}\n", bold=True)
    sys.stdout.flush()


def _fulltilt(*arguments: str | Path) -> None:
    """Another verb, as the user would type it. If it fails, so does the demo."""
    words = [str(argument) for argument in arguments]
    typer.echo(f"$ fulltilt {' '.join(words)}")
    sys.stdout.flush()
    code = _wait(subprocess.Popen([sys.executable, "-m", "fulltilt", *words]))
    if code:
        raise typer.Exit(code if code > 0 else 128 - code)


def _wait(verb: subprocess.Popen[bytes]) -> int:
    """Ctrl-C reaches the verb too, which ends in order."""
    while True:
        try:
            return verb.wait()
        except KeyboardInterrupt:
            continue


def _train(out: Path) -> None:
    from fulltilt.cli.train import run_recipe
    from fulltilt.recipes import find

    typer.echo(f"$ fulltilt train cod --backbone {TRAINED['backbone']} --img-size {TRAINED['img_size']} … --out {out}")
    raise typer.Exit(run_recipe(find("cod"), {**TRAINED, "out": str(out), "fresh": True}))
