"""`fulltilt run`: any script or launcher, recorded and explained, behaving exactly as without it."""

from __future__ import annotations

import os
import re
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from fulltilt import __version__, store
from fulltilt.cli.child import Child
from fulltilt.cli.own_flags import USAGE_ERROR, given_to_script, hint
from fulltilt.cli.streams import tell
from fulltilt.errors import UsageError
from fulltilt.probes.cgroup import oom_kills
from fulltilt.probes.gpu import Gpus
from fulltilt.probes.machine import describe_machine
from fulltilt.recorder import attach
from fulltilt.recorder.launch import job_command, job_name
from fulltilt.recorder.loaders.overrides import read_settings
from fulltilt.records import RunRecord, Settings

# Each process of the job imports it once torch is there; this one need not.
LIVE_TUNING = "fulltilt.tuning.live"
# Behind the script they are the script's. Hardly any has the first; the others are told of where it does not know them.
RARE_FLAGS = ("--auto",)
OTHER_FLAGS = ("--out", "--deep", "--settings")


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(
        "run",
        context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
        options_metavar="[OPTIONS] [--]",
    )(run)


def run(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT.py ARGS | -m MODULE ARGS | torchrun … | accelerate launch …", show_default=False
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder [default: fulltilt-runs/<date>-<script>]")] = None,
    deep: Annotated[int, typer.Option(min=0, help="Profile this many steps with torch.profiler.")] = 0,
    settings: Annotated[Path | None, typer.Option(help="Settings file whose loader settings are put in force.")] = None,
    auto: Annotated[bool, typer.Option("--auto", help="Tune the data loading while the job trains.")] = False,
    module: Annotated[bool, typer.Option("-m", help="Run a module, as python -m does.")] = False,
) -> None:
    """Run a training job unchanged, record where its time goes, and say why the GPU is idle."""
    arguments = (["-m"] if module else []) + list(command or [])
    resolved = job_command(arguments)
    asked = read_settings(settings) if settings is not None else Settings()
    name = job_name(arguments)
    folder = run_folder(out, name)
    for flag in given_to_script(RARE_FLAGS, arguments):
        tell(f"fulltilt: {hint('run', flag)}")
    with store.OwnedFolder(folder).locked(f"another run is writing into {folder}"):
        earlier = store.move_earlier_run(folder)
        if earlier is not None:
            tell(f"fulltilt: {folder} held a run already; it is now in {earlier}")
        code = Job(arguments, resolved, name, folder, settings, asked, deep, auto).run()
    for flag in given_to_script(OTHER_FLAGS, arguments) if code == USAGE_ERROR else ():
        tell(f"fulltilt: {hint('run', flag)}")
    raise typer.Exit(code)


def run_folder(out: Path | None, name: str) -> Path:
    """The run folder, made and writable."""
    if out is None:
        stem = f"{datetime.now():%Y%m%d-%H%M%S}-{re.sub(r'[^A-Za-z0-9._-]+', '-', name)[:60]}"
        out = Path("fulltilt-runs") / stem
        for number in range(2, 1000):
            if not out.exists():
                break
            out = out.with_name(f"{stem}-{number}")
    return store.create_folder(out)


class Job:
    """One run of a job from its start to its verdict."""

    def __init__(
        self,
        arguments: list[str],
        resolved: list[str],
        name: str,
        folder: Path,
        settings: Path | None,
        asked: Settings,
        deep: int,
        auto: bool,
    ) -> None:
        self._arguments = arguments
        self._resolved = resolved
        self._folder = folder
        self._settings = settings
        self._deep = deep
        self._auto = auto
        self._gpus = Gpus.open()
        self._record = RunRecord(
            name=name,
            command=tuple(arguments),
            started_at=datetime.now().astimezone().isoformat(timespec="seconds"),
            machine=describe_machine(self._gpus),
            fulltilt=__version__,
            asked=asked,
        )

    def run(self) -> int:
        """Start the job, watch it, explain it. Returns the job's own exit code, or ends by the job's own signal."""
        store.write_json(self._folder / store.RUN_FILE, self._record)
        killed_before = oom_kills()
        t0_ns = time.perf_counter_ns()
        variables = attach.environment(self._folder, t0_ns, self._settings, self._deep)
        environment = {**os.environ, **variables, **({attach.ALSO: LIVE_TUNING} if self._auto else {})}
        try:
            child = Child(self._resolved, environment)
        except OSError as error:
            raise UsageError(f"cannot start {self._resolved[0]}: {error.strerror or error}") from error
        from fulltilt.cli.watching import Watching

        with Watching(self._folder, child.pid, t0_ns, self._gpus) as watching:
            status = child.wait(watching.tick)
        from fulltilt.cli.ending import end_run

        wall_s = (time.perf_counter_ns() - t0_ns) * 1e-9
        killed = max((oom_kills() or 0) - killed_before, 0) if killed_before is not None else 0
        end_run(self._folder, self._record, wall_s, status, killed)
        return child.leave(status)
