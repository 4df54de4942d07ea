"""A small job with everything in it that a resume could forget, run in a child process that tests kill and starve.

Each step appends the hash of weights, buffers, optimizer, average and sample names to ``OUT/chain.txt``.
"""

from __future__ import annotations

import functools
import hashlib
import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
import torch._dynamo  # the first optimizer imports it anyway; here it is done once for all children
import torch.distributed.checkpoint  # likewise
import torch.distributed.fsdp  # likewise
from torch.distributed.tensor import DTensor

from fulltilt.train import checkpoint
from fulltilt.train.config import TrainSettings
from fulltilt.train.exit_code import exit_code_of
from fulltilt.train.job import Job
from fulltilt.train.loop import train
from fulltilt.train.progress import TrainingScreen
from fulltilt.train.train_state import StepEnd

DEFAULTS: dict[str, Any] = {
    "epochs": 2,
    "batch_size": 8,
    "lr": 0.01,
    "save_every": 3,
    "clip_norm": 1.0,
    "ema_decay": 0.9,
    "device": "cpu",
    "warmup_steps": 2,
    "monitor": "loss",
    "monitor_mode": "min",
    "hang_timeout_s": 100.0,  # below the limit of the tests: who hangs leaves the stacks of all its processes
    "record": False,  # disk calls are counted, and the kills have to fall on those of the checkpoints
}


class NoisySamples:
    """Samples with augmentation drawn from Python, NumPy and torch."""

    def __init__(self, count: int = 44) -> None:
        self.inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.randn(6) * 0.1 + random.random() * 0.01 + float(numpy.random.rand()) * 0.01
        return self.inputs[index] + noise, self.inputs[index].sum() > 0


class Net(torch.nn.Module):
    """Dropout draws from the random state; batch norm has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 12)
        self.norm = torch.nn.BatchNorm1d(12)
        self.dropout = torch.nn.Dropout(0.3)
        self.last = torch.nn.Linear(12, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.dropout(torch.relu(self.norm(self.first(inputs))))).squeeze(1)


def loss(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    inputs, labels = batch
    outputs = model(inputs)
    value = torch.nn.functional.binary_cross_entropy_with_logits(outputs.float(), labels.float())
    if model.training:  # a loss may draw from any generator
        value = value * (1 + 0.1 * random.random() + 0.1 * float(numpy.random.rand()))
    return value, {"accuracy": ((outputs > 0) == labels).float().mean()}


def make_job(**changes: Any) -> Job:
    torch.manual_seed(7)
    return Job(**{"model": Net(), "loss": loss, "data": NoisySamples(), "eval_data": NoisySamples(12), **changes})


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of it when each rank has a part; then all ranks take part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def fingerprint(end: StepEnd) -> str:
    digest = hashlib.sha256(end.samples.encode())
    state = end.state
    tensors = [*state.model.state_dict().values(), *(state.stepper.ema.average.values() if state.stepper.ema else ())]
    for entry in state.stepper.optimizer.state.values():
        tensors.extend(value for value in entry.values() if isinstance(value, torch.Tensor))
    for tensor in [*tensors, state.stepper.scale.scale, state.stepper.scale.good_steps, *state.totals._sums.values()]:
        digest.update(bytes(whole(tensor.detach()).contiguous().reshape(-1).view(torch.uint8).numpy()))
    digest.update(repr([group["lr"] for group in state.stepper.optimizer.param_groups]).encode())
    digest.update(
        repr(
            (
                state.guard.state_dict(),
                state.stepper.micro.most,
                state.eval_micro.most,
                state.history.values,
                state.progress,
            )
        ).encode()
    )
    return digest.hexdigest()[:24]


@dataclass
class Order:
    """What the child is to do."""

    out: Path
    settings: dict[str, Any] = field(default_factory=dict)
    # Called in the child before the run, with the order; it may return changes of the job.
    prepare: Callable[[Order], dict[str, Any] | None] | None = None
    on_step: Callable[[StepEnd], None] | None = None
    kill_at: int | None = None
    resume_from: Path | None = None
    rank: int = 0
    world: int = 1
    port: int = 0
    note: Any = None


class Interrupted(Exception):
    """Raised by a test's step hook in the place of a kill, when the run is in the test's own process."""


def run_here(
    out: Path, *, stop_at: int | None = None, changes: dict[str, Any] | None = None, **settings: Any
) -> dict[int, str]:
    """Train in this process and return the hash of each step; ``stop_at`` breaks off there as a kill would."""
    hashes: dict[int, str] = {}

    def note(end: StepEnd) -> None:
        hashes[end.step] = f"{fingerprint(end)} {end.samples}"
        if end.step == stop_at:
            raise Interrupted

    screen = TrainingScreen(out, stream=(out.parent / f"{out.name}.txt").open("a"), sampled=False)
    try:
        train(make_job(**(changes or {})), TrainSettings(**{**DEFAULTS, **settings}), out, screen=screen, on_step=note)
    except Interrupted:
        pass
    finally:
        screen.stream.close()
    return hashes


def run(order: Order) -> None:
    """In the child: train, log the chain, exit as a user's command would."""
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # as in a user's own process; ours came from a fork server
    sys.stdout = (order.out / f"stdout.{order.rank}.txt").open("a", buffering=1)
    sys.stderr = (order.out / f"stderr.{order.rank}.txt").open("a", buffering=1)
    if order.world > 1:
        os.environ.update(
            RANK=str(order.rank),
            WORLD_SIZE=str(order.world),
            LOCAL_RANK=str(order.rank),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(order.port),
        )
    changes = (order.prepare(order) if order.prepare else None) or {}
    if order.kill_at is not None:
        kill_at_disk_call(order.kill_at)
    chain = os.open(order.out / f"chain.{order.rank}.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(end: StepEnd) -> None:
        _write(chain, f"{end.step} {fingerprint(end)} {end.samples}\n".encode())
        if order.on_step is not None:
            order.on_step(end)

    def body() -> None:
        screen = TrainingScreen(order.out, speaks=order.rank == 0, sampled=False)
        settings = TrainSettings(**{**DEFAULTS, **order.settings})
        train(make_job(**changes), settings, order.out, resume_from=order.resume_from, screen=screen, on_step=note)

    code = exit_code_of(body, order.out)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


_write = os.write  # the chain's own lines are not among the calls that kill


def kill_at_disk_call(number: int) -> None:
    """SIGKILL this process at its ``number``-th write, fsync or rename; a write is cut in the middle first."""
    left = number

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal left
            left -= 1
            if left <= 0:
                if real is _write:
                    _write(args[0], memoryview(args[1])[: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args)

        return call

    os.write, os.fsync, os.replace = counted(os.write), counted(os.fsync), counted(os.replace)


_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.faults.victim"])
# The fork server finds this module through the environment only; without it every child would import torch anew.
_PROJECT = str(Path(__file__).parents[2])
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_PROJECT, os.environ.get("PYTHONPATH")]))


@functools.cache
def start_fork_server() -> None:
    """Its imports take a minute or two on a busy machine; no job's time limit is to count them."""
    first = _context.Process(target=str)
    first.start()
    first.join()


def start(order: Order) -> multiprocessing.process.BaseProcess:
    start_fork_server()
    checkpoint.claim(order.out)  # the files of the test lie in it, too
    child = _context.Process(target=run, args=(order,))
    child.start()
    return child


def exit_code(order: Order, timeout_s: float = 150) -> int:
    """Run the order to its end and return the exit code; a negative one is a signal."""
    child = start(order)
    child.join(timeout_s)
    if child.is_alive():
        child.kill()
        child.join()
        raise AssertionError(f"the job hangs; {told(order.out)}")
    assert child.exitcode is not None
    return child.exitcode


def chain(out: Path, rank: int = 0) -> dict[int, str]:
    """The hash of each step. A step that was done twice must have given the same hash twice."""
    found: dict[int, str] = {}
    path = out / f"chain.{rank}.txt"
    for line in path.read_text().splitlines() if path.exists() else []:
        step, rest = line.split(" ", 1)
        assert found.setdefault(int(step), rest) == rest, f"step {step} differs from itself"
    return found


def told(out: Path, rank: int = 0) -> str:
    """What the user saw, and the stacks of a run that hung."""
    files = [out / f"stdout.{rank}.txt", out / f"stderr.{rank}.txt", out / f"stacks.rank-{rank}.log"]
    return "".join(path.read_text() for path in files if path.exists())
