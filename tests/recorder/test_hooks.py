"""Each patch is reversible: afterwards every entry point of torch is the original again."""

from __future__ import annotations

import gc
import importlib
import math
import pickle
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from fulltilt.recorder.hooks.cuda import READS
from fulltilt.recorder.hooks.processes import COLLECTIVES
from fulltilt.recorder.marks import Activity
from fulltilt.recorder.session import Session


def entry_points() -> dict[str, Any]:
    scaler, autocast = torch.amp.grad_scaler.GradScaler, torch.amp.autocast_mode.autocast
    loader, replica = torch.utils.data.DataLoader, torch.nn.parallel.DistributedDataParallel
    hooks = importlib.import_module("torch.optim.optimizer")
    points = {
        "init": vars(loader)["__init__"],
        "iter": vars(loader)["__iter__"],
        "backward": torch.autograd.backward,
        "grad": torch.autograd.grad,
        "scaler": vars(scaler)["step"],
        "autocast": vars(autocast)["__enter__"],
        "save": torch.save,
        "train": vars(torch.nn.Module)["train"],
        "synchronize": torch.cuda.synchronize,
        "replica": vars(replica)["__init__"],
        "capture_begin": vars(torch.cuda.CUDAGraph)["capture_begin"],
        "capture_end": vars(torch.cuda.CUDAGraph)["capture_end"],
        "replay": vars(torch.cuda.CUDAGraph)["replay"],
        "pre": len(hooks._global_optimizer_pre_hooks),
        "post": len(hooks._global_optimizer_post_hooks),
    }
    points |= {name: vars(torch.Tensor).get(name, "inherited") for name in ("to", "cuda", *READS)}
    points |= {name: getattr(torch.distributed, name) for name in COLLECTIVES if hasattr(torch.distributed, name)}
    points |= {"collect": gc.collect, "collections": len(gc.callbacks)}
    points |= {"threads": threading.enumerate, "number of threads": threading.active_count}
    points |= {"excepthook": sys.excepthook, "excepthook of threads": threading.excepthook}
    return points


def test_every_original_is_back(tmp_path: Path) -> None:
    before = entry_points()
    session = Session(torch, tmp_path, time.perf_counter_ns())
    session.install()
    session.device.trains_on_gpu()
    during = entry_points()
    session.finish()
    assert entry_points() == before
    changed = {name for name in before if during[name] != before[name]}
    kept = {"to", "cuda"} if "torchvision.tv_tensors" in sys.modules else set()
    if sys.version_info < (3, 11, 8):
        kept.add("collections")  # Python code within a collection makes parsers of other threads fail there
    assert changed == set(before) - kept


def test_a_script_that_waits_for_all_threads_does_not_wait_for_ours(tmp_path: Path) -> None:
    before = threading.enumerate(), threading.active_count()
    session = Session(torch, tmp_path, time.perf_counter_ns())
    session.install()
    session.begin_here()
    try:
        assert session.observer.is_alive()
        assert (threading.enumerate(), threading.active_count()) == before
    finally:
        session.finish()


def test_what_a_cpu_job_reads_is_left_alone(tmp_path: Path) -> None:
    """torch's warnings name the file that made the call: with a wrapper in between that was one of ours."""
    before = {name: vars(torch.Tensor).get(name) for name in READS}
    session = Session(torch, tmp_path, time.perf_counter_ns())
    session.install()
    try:
        assert {name: vars(torch.Tensor).get(name) for name in READS} == before
    finally:
        session.finish()


def test_values_and_errors_pass_through(tmp_path: Path) -> None:
    session = Session(torch, tmp_path, time.perf_counter_ns())
    session.install()
    try:
        x = torch.ones(3, requires_grad=True)
        (x * 2).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [2.0, 2.0, 2.0]
        assert torch.ones(2).to(torch.float64).dtype == torch.float64
        assert torch.tensor(4.0).item() == 4.0
        assert isinstance(iter(torch.utils.data.DataLoader([1])), _BaseDataLoaderIter)
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.ones(1).sum().backward()
        with pytest.raises(ValueError, match="num_workers"):
            torch.utils.data.DataLoader([1], num_workers=-1)
    finally:
        session.finish()


class SaysItIsOnAGpu(torch.Tensor):
    """A tensor of the CPU, so that what waits for a GPU can be seen without one."""

    is_cuda = True


class NoEvents:
    """A GPU's clock without a GPU."""

    def record(self) -> None:
        return None


@pytest.mark.parametrize(
    ("read", "call"),
    [
        (lambda loss: loss.item(), ".item()"),
        (float, "float()"),
        (int, "int()"),
        (lambda loss: bool(loss > 1), "bool()"),
        (lambda loss: "high" if loss > 1 else "low", "bool()"),
        (lambda loss: loss.nonzero(), ".nonzero()"),
        (math.isnan, "float()"),
    ],
)
def test_whatever_a_script_reads_from_the_gpu_is_a_wait(tmp_path: Path, read: Any, call: str) -> None:
    loss = torch.tensor(4.0).as_subclass(SaysItIsOnAGpu)
    plain = read(loss)
    session = Session(torch, tmp_path, time.perf_counter_ns())
    session.install()
    session.device.trains_on_gpu()
    session.recorder.use_this_thread()
    session.recorder.clock = NoEvents()  # type: ignore[assignment]
    try:
        session.recorder.active = True
        assert str(read(loss)) == str(plain)
        (line,) = session.state.lines.waiting_for_gpu.top()
    finally:
        session.recorder.clock = None
        session.finish()
    assert line.call == call
    assert line.where.startswith("tests/recorder/test_hooks.py:")


@pytest.mark.slow
def test_a_compiled_model_still_compiles_whole(tmp_path: Path) -> None:
    session = Session(torch, tmp_path, time.perf_counter_ns())
    session.install()
    try:

        def step(x: torch.Tensor) -> torch.Tensor:
            return (x.to(torch.float64) * 2).cpu().to(torch.float32)

        compiled = torch.compile(step, fullgraph=True, backend="eager")
        assert torch.equal(compiled(torch.ones(4)), torch.full((4,), 2.0))
    finally:
        session.finish()
        torch._dynamo.reset()


def test_a_closure_is_the_users_code_and_the_optimizers_own_work_is_not(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    seen: list[Activity] = []

    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append(session.recorder.activity)
            return super().step(closure)

    session = Session(torch, tmp_path, time.perf_counter_ns())
    session.install()
    try:
        optimizer = Watched([weight], lr=0.1)

        def closure() -> torch.Tensor:
            loss = weight.sum()
            loss.backward()
            return loss

        closure()
        optimizer.step()
        optimizer.step(closure)
        optimizer.step(closure=closure)
        assert seen == [Activity.OPTIMIZER, Activity.USER, Activity.USER]
        assert session.state.optimizer_calls == 3
        # What follows comes behind a step: torch's work there, as in a callback of Lightning's, is no forward pass.
        assert (session.recorder.activity, session.recorder.previous) == (Activity.USER, Activity.OPTIMIZER)
    finally:
        session.finish()


def test_the_learning_rate_is_that_from_before_a_warm_up(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    session = Session(torch, tmp_path, time.perf_counter_ns())
    session.install()
    try:
        optimizer = torch.optim.AdamW([{"params": [weight], "lr": 0.1}])
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 100)
        weight.sum().backward()
        optimizer.step()
        assert (optimizer.param_groups[0]["lr"], session.state.learning_rate) == (0.001, 0.1)
    finally:
        session.finish()


@pytest.mark.parametrize(
    "name", ["torch.save", "torch.distributed.all_reduce", "torch.Tensor.to", "torch.nn.Module.train"]
)
def test_what_is_patched_can_be_pickled(tmp_path: Path, name: str) -> None:
    """A pool of processes that saves in the background is given torch.save itself."""
    session = Session(torch, tmp_path, time.perf_counter_ns())
    session.install()
    try:
        patched = eval(name, {"torch": torch})
        assert pickle.loads(pickle.dumps(patched)) is patched
    finally:
        session.finish()


def test_what_the_script_has_put_in_place_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a recording, and a forked child, take only our own patches away."""
    session = Session(torch, tmp_path, time.perf_counter_ns())
    monkeypatch.setattr(torch, "save", torch.save)
    monkeypatch.setattr(torch.Tensor, "to", torch.Tensor.to)
    monkeypatch.delitem(sys.modules, "torchvision.tv_tensors", raising=False)
    session.install()
    theirs, ours = print, torch.Tensor.to
    torch.save = theirs
    monkeypatch.setitem(sys.modules, "torchvision.tv_tensors", torch)  # imported since: it keeps our Tensor.to
    session.finish()
    assert torch.save is theirs
    assert torch.Tensor.to is ours


def test_what_is_compiled_asks_for_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo knows no thread's number, and a graph of one piece allows nothing that it does not know."""
    monkeypatch.setattr(torch.distributed, "barrier", lambda: "plain")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    session = Session(torch, tmp_path, time.perf_counter_ns())
    session.install()
    with monkeypatch.context() as patch:
        patch.setattr(session.recorder, "on_training_thread", lambda: pytest.fail("dynamo cannot trace this"))
        assert torch.distributed.barrier() == "plain"
        assert torch.nn.Linear(1, 1).eval().training is False
        session._steps._after_step(None, (), {})
    session.finish()
