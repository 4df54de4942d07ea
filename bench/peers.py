"""Which tool names which cause: Fulltilt, TraceML and gpuprof on jobs whose cause is known (tests/zoo).

    python bench/peers.py [--only NAME ...]        needs: pip install traceml-ai gpuprof

Each script trains four times as long as in the zoo. Fulltilt runs it as it is; the others are written into it
as their documents say: TraceML's `trace_step` around the body of the training loop, gpuprof's `profile` around it all.
torch.profiler gives no advice of its own since torch dropped its pattern matcher, so that it has no column.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[1]
ZOO = ROOT / "tests/zoo"
LONGER = 4
INPUT = {"input_serial", "input_cpu_bound", "input_io_bound", "input_handover", "epoch_restart"}
# A script of the zoo, and its cause. All run without a GPU in one process.
JOBS = {
    "serial_waits": "input_serial",
    "serial_decode": "input_serial",
    "worker_decode": "input_cpu_bound",
    "worker_waits": "input_io_bound",
    "numpy_collate": "input_handover",
    "tiny_epochs": "epoch_restart",
    "sleep_after_step": "host_code",
    "validate_often": "validation_heavy",
    "save_often": "checkpoint_stall",
    "recompiling": "recompiling",
    "growing_history": "slowing_down",
    "padded_text": "padding_waste",
    "healthy": "compute_bound",
}


@dataclass(frozen=True)
class Said:
    """What a tool said of a job, and whether that is the cause, only the part of the step it lies in, or neither."""

    text: str
    mark: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=JOBS, default=list(JOBS))
    parser.add_argument("--tools", nargs="*", default=["fulltilt", "traceml-ai", "gpuprof"])
    asked = parser.parse_args()
    jobs = asked.only
    tools: dict[str, Callable[[Path, str], Said]] = {}
    known = {"fulltilt": run_fulltilt, "traceml-ai": run_traceml, "gpuprof": run_gpuprof}
    for package, tool in known.items():
        if package not in asked.tools:
            continue
        try:
            version(package)
            tools[package] = tool
        except PackageNotFoundError:
            print(f"{package} is not installed: left out", file=sys.stderr)
    print(f"Python {sys.version.split()[0]}, torch {version('torch')}")
    print(", ".join(f"{name} {version(name)}" for name in tools))
    print(f"\n| job | cause | {' | '.join(tools)} |\n|---|---|{'---|' * len(tools)}")
    counted = dict.fromkeys(tools, 0)
    for name in jobs:
        row = []
        for label, run in tools.items():
            with tempfile.TemporaryDirectory() as folder:
                shutil.copy(ZOO / "stopwatch.py", folder)
                script = Path(folder) / f"{name}.py"
                script.write_text(longer((ZOO / script.name).read_text()))
                said = run(script, JOBS[name])
            counted[label] += said.mark == "cause"
            row.append(f"**{said.mark}**: {said.text}")
        print(f"| {name} | `{JOBS[name]}` | {' | '.join(row)} |", flush=True)
    print("\n" + ", ".join(f"{tool} names {right} of {len(jobs)} causes" for tool, right in counted.items()))


# --------------------------------------------------------------------------- the tools


def run_fulltilt(script: Path, cause: str) -> Said:
    execute(script, "-m", "fulltilt", "run", "--out", "run", script.name)
    answer = json.loads((script.parent / "run/findings.json").read_text())
    first = answer["findings"][0] if answer["findings"] else {"code": answer["verdict"]["code"], "where": None}
    place = f" at {first['where']}" if first["where"] else ""
    mark = "cause" if first["code"] == cause else "part" if {first["code"], cause} <= INPUT else "no"
    return Said(f"{first['code']}{place}", mark)


# What its own documents list as the causes behind a verdict. Its advice for input, more workers, is the cure of one.
TRACEML = {
    "INPUT-BOUND": INPUT,
    "RESIDUAL-HEAVY": {"host_code", "validation_heavy", "checkpoint_stall", "slowing_down"},
    "COMPUTE-BOUND": {"padding_waste", "recompiling"},
}


def run_traceml(script: Path, cause: str) -> Said:
    tree = ast.parse(script.read_text())
    loop = training_loops(tree)[-1]
    loop.body = wrapped("with traceml.trace_step(model):", loop.body)
    after_future(tree, "import traceml_ai as traceml\ntraceml.init(mode='auto')")
    script.write_text(ast.unparse(tree))
    start = "from traceml_ai.launcher.cli import main; main()"
    for attempt in range(3):  # on a busy machine its aggregator gives up before it has started, and runs no job
        ports = ["--master-port", free_port(), "--aggregator-port", free_port()]
        printed = execute(script, "-c", start, "run", script.name, "--run-name", f"job-{attempt}", *ports)
        if "TRUTH" in printed:
            break
    else:
        return Said("it did not run the job", "not run")
    if (found := re.search(r"Verdict: (.*?)\s*(?:\(|\|)", printed)) is None:
        return Said("no verdict", "no")
    verdict = found[1].strip()
    healthy = cause == "compute_bound" and verdict in ("COMPUTE-BOUND", "BALANCED", "HEALTHY", "NO CLEAR BOTTLENECK")
    advised = cause == "input_serial" and verdict == "INPUT-BOUND"
    mark = "cause" if healthy or advised else "part" if cause in TRACEML.get(verdict, ()) else "no"
    return Said(verdict, mark)


# Its rules tell a loader's causes apart; these are words of their titles.
GPUPROF = {
    "input_cpu_bound": ("CPU pegged", "CPU-bound"),
    "input_io_bound": ("I/O", "disk"),
    "slowing_down": ("drift", "slower"),
    "recompiling": ("recompil",),
    "checkpoint_stall": ("checkpoint",),
    "validation_heavy": ("validation",),
}


def run_gpuprof(script: Path, cause: str) -> Said:
    tree = ast.parse(script.read_text())
    replace_in(tree, training_loops(tree)[0], "with gpuprof.profile('job'):")
    after_future(tree, "import gpuprof")
    script.write_text(ast.unparse(tree))
    printed = execute(script, script.name)
    # [LOW] ones are remarks, such as what the run cost.
    told = [line.strip() for line in re.findall(r"\[(?:HIGH|MED|MEDIUM)\]\s+(.*)", printed)]
    text = "; ".join(told) or "nothing above LOW"
    if cause == "compute_bound":
        return Said(text, "no" if told else "cause")
    if any(word.lower() in text.lower() for word in GPUPROF.get(cause, ())):
        return Said(text, "cause")
    if cause in INPUT and ("loader" in text or "refetch" in text):
        return Said(text, "cause" if cause == "input_serial" else "part")  # it advises more workers
    return Said(text, "no")


# --------------------------------------------------------------------------- scripts


def execute(script: Path, *arguments: str) -> str:
    """All that a command prints, in the script's folder."""
    command = [sys.executable, *arguments]
    ended = subprocess.run(command, cwd=script.parent, capture_output=True, text=True, check=False, timeout=600)
    return ended.stdout + ended.stderr


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def longer(source: str) -> str:
    """The script for four times as long: some tools need more than the zoo's two to four seconds."""
    limited = re.sub(r"(watch\.seconds [<>] )([0-9.]+)", rf"\g<1>{LONGER} * \g<2>", source)
    tree = ast.parse(limited)
    if limited == source:  # it trains for some passes, not for some seconds
        replace_in(tree, training_loops(tree)[0], f"for _ in range({LONGER}):")
    return ast.unparse(tree)


def replace_in(tree: ast.Module, loop: ast.stmt, statement: str) -> None:
    """Put ``statement`` around the loop, wherever it stands."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and loop in body:
            place = body.index(loop)
            body[place : place + 1] = wrapped(statement, [loop])
            return


def training_loops(tree: ast.Module) -> list[ast.For | ast.While]:
    """The loops around the optimizer's step, the outermost first."""
    loops = (node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While))
    return [loop for loop in loops if "optimizer.step()" in ast.unparse(loop)]


def wrapped(statement: str, body: list[ast.stmt]) -> list[ast.stmt]:
    block = ast.parse(f"{statement}\n    pass").body[0]
    assert isinstance(block, ast.With | ast.For)
    block.body = body
    return [block]


def after_future(tree: ast.Module, lines: str) -> None:
    """Put ``lines`` below the docstring."""
    tree.body[1:1] = ast.parse(lines).body


if __name__ == "__main__":
    main()
