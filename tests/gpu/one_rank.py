"""A rank of a torchrun job of one: NCCL, DDP and FSDP on the only GPU there is, against training in one process.

``python -m torch.distributed.run --standalone --nproc-per-node=1 -m tests.gpu.one_rank OUT cuda``
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fulltilt.train import checkpoint, distributed
from fulltilt.train.config import TrainSettings
from fulltilt.train.distributed import Group
from fulltilt.train.job import Job
from fulltilt.train.loop import train
from fulltilt.train.progress import TrainingScreen
from fulltilt.train.train_state import StepEnd


class Samples:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(32, generator=generator), float(index % 2)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    hidden = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.LayerNorm(32), torch.nn.GELU()) for _ in range(3)]
    return torch.nn.Sequential(*hidden, torch.nn.Linear(32, 1), torch.nn.Flatten(0))


class FullOnce:
    """A loss whose second backward runs out of memory in the middle, once."""

    def __init__(self, fails: bool) -> None:
        self.calls, self.fails = 0, fails

    def __call__(self, net: Any, batch: Any) -> torch.Tensor:
        self.calls += 1
        if self.fails and self.calls == 2:
            hook = net[1][0].weight.register_hook(lambda _gradient: self._fail(hook))
        return torch.nn.functional.binary_cross_entropy_with_logits(net(batch[0]).float(), batch[1].float())

    def _fail(self, hook: Any) -> None:
        hook.remove()
        raise torch.OutOfMemoryError("CUDA out of memory (pretended)")


@contextlib.contextmanager
def among_ranks() -> Iterator[None]:
    """Within it a single rank does all that one of many does."""
    before = Group.alone
    Group.alone = property(lambda _self: False)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Group.alone = before  # type: ignore[method-assign]


def trained(out: Path, device: str, *, fails: bool = False, stop_at: int | None = None, **settings: Any) -> Any:
    """The weights of the last checkpoint, as one process, a replica or shards left them."""

    def note(end: StepEnd) -> None:
        if device == "cuda" and not end.state.group.alone:
            assert "cuda:nccl" in dist.get_backend_config()
        if end.step == stop_at:
            raise InterruptedError

    chosen = {
        "batch_size": 16,
        "epochs": 2,
        "save_every": 3,
        "lr": 1e-2,
        "clip_norm": 1.0,
        "ema_decay": 0.9,
        **settings,
    }
    job = Job(model=model(), loss=FullOnce(fails), data=Samples(), eval_data=Samples())
    with contextlib.suppress(InterruptedError):
        options = TrainSettings(**chosen, device=device, record=False, deterministic=True)  # type: ignore[arg-type]
        train(job, options, out, screen=TrainingScreen(out, speaks=False), on_step=note)
    return checkpoint.load(checkpoint.folders(out / "checkpoints")[0])[0]


def main(out: Path, device: str) -> None:
    distributed.LEAST_BLOCK_PARAMETERS = 1
    for precision in ("fp32", "bf16", "fp16") if device == "cuda" else ("fp32",):
        base = out / precision
        alone = trained(base / "alone", device, precision=precision)
        with among_ranks():
            found = {
                "replica": trained(base / "replica", device, precision=precision),
                "replica after memory ran out": trained(base / "failed", device, precision=precision, fails=True),
                "shards": trained(base / "shards", device, precision=precision, fsdp=True),
            }
            trained(base / "cut", device, precision=precision, fsdp=True, stop_at=5)
            resumed = trained(base / "cut", device, precision=precision, fsdp=True)
        for name, weights in found.items():
            # Other sums: of smaller pieces after memory ran out, and of rounded numbers in half precision.
            near = 1e-5 if precision == "fp32" and "memory" not in name else 2e-2
            for key, tensor in weights.items():
                torch.testing.assert_close(tensor, alone[key], rtol=near, atol=near, msg=f"{precision} {name} {key}")
        assert all(torch.equal(resumed[key], tensor) for key, tensor in found["shards"].items()), precision
        print(f"{precision}: {', '.join(found)} and an exact resume agree with one process", flush=True)


def shards(out: Path, device: str) -> None:
    """A run in shards, cut off and resumed: by shards with the same bits, and in one process nearly so."""
    distributed.LEAST_BLOCK_PARAMETERS = 1
    with among_ranks():
        whole = trained(out / "whole", device, fsdp=True)
        trained(out / "cut", device, fsdp=True, stop_at=5)
        saved = checkpoint.folders(out / "cut" / "checkpoints")[0]
        names = {file.name for file in saved.iterdir()}
        assert {"__0_0.distcp", ".metadata"} <= names, names
        assert checkpoint.MODEL_FILE not in names
        shutil.copytree(out / "cut", out / "alone")
        resumed = trained(out / "cut", device, fsdp=True)
    alone = trained(out / "alone", device, fsdp=True)
    assert all(torch.equal(resumed[key], tensor) for key, tensor in whole.items())
    for key, tensor in whole.items():
        torch.testing.assert_close(alone[key], tensor, rtol=2e-2, atol=2e-2, msg=key)
    print("shards were resumed with and without FSDP", flush=True)


if __name__ == "__main__":
    (shards if sys.argv[3:] else main)(Path(sys.argv[1]), sys.argv[2])
    if dist.is_initialized():  # a run that was broken off leaves NCCL as it is
        dist.destroy_process_group()
