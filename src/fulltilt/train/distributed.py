"""Ranks under torchrun: the process group, gradients with DDP and FSDP2, and `--gpus N`."""

from __future__ import annotations

import datetime
import math
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from fulltilt.errors import MachineError, UsageError
from fulltilt.figures import count
from fulltilt.probes.host import cpu_capacity
from fulltilt.train.job import Loss
from fulltilt.train.stop import stop_signals_to

_AFTER_THE_WATCHDOG_S = 30.0


@dataclass(frozen=True, slots=True)
class RankInfo:
    """This process among those of the job, as torchrun numbers them."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0


def rank_from_env(environment: Mapping[str, str] | None = None) -> RankInfo:
    """RANK, WORLD_SIZE and LOCAL_RANK; one process without them. Raises UsageError under srun without torchrun."""
    env = os.environ if environment is None else environment
    if "RANK" not in env or "WORLD_SIZE" not in env:
        if "SLURM_PROCID" in env and env.get("SLURM_STEP_NUM_TASKS", "1") != "1":
            what = f"srun started {env['SLURM_STEP_NUM_TASKS']} processes that do not know of each other"
            raise UsageError(what, "Let srun start one torchrun on each machine: srun --ntasks-per-node=1 torchrun ...")
        return RankInfo()
    defaults = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}
    try:
        return RankInfo(*(int(env.get(name, default)) for name, default in defaults.items()))
    except ValueError as error:
        raise UsageError(f"the launcher's {', '.join(defaults)} are not numbers") from error


def device_of(name: str, local_rank: int) -> torch.device:
    """The device that a rank trains on. Raises UsageError for a GPU that is not there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("device: cuda, but torch sees no GPU", "Use device: auto, or see `fulltilt check`.")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= (present := torch.cuda.device_count()):
        what = f"torch sees {count('GPU', present)} for {local_rank + 1} or more ranks"
        raise UsageError(what, "Start one rank a GPU, or use device: cpu; see `fulltilt check`.")
    return torch.device("cuda", local_rank)


def part_of(total: int, info: RankInfo) -> int:
    """This rank's part of a total (workers, samples of a batch); parts differ by at most one and add up to it."""
    return total * (info.rank + 1) // info.world_size - total * info.rank // info.world_size


def divided(batch_size: int, workers: int, info: RankInfo) -> str:
    """How batch and workers are divided, in words. Raises UsageError for a batch smaller than the ranks."""
    if batch_size < info.world_size:
        raise UsageError(
            f"batch_size {batch_size} cannot be divided among {info.world_size} ranks", "Raise batch_size."
        )
    shares = (divmod(total, info.world_size) for total in (batch_size, workers))
    batches, helpers = (f"{each} or {each + 1}" if rest else str(each) for each, rest in shares)
    return f"batch {batch_size} = {info.world_size} ranks × {batches}; workers {workers} = {helpers} a rank"


class Group:
    """The process group of the job. With a single rank every call returns at once."""

    def __init__(self, info: RankInfo, device: torch.device, timeout_s: float) -> None:
        self.info = info
        self.device = device
        # Longer than our own watchdog, which writes the stacks: NCCL's only aborts.
        self.timeout = datetime.timedelta(seconds=timeout_s + _AFTER_THE_WATCHDOG_S)
        self._began = False
        if not self.alone and not dist.is_initialized():
            # CPU tensors go through gloo: exchanging flags does not wait for a GPU.
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            try:
                # With a device NCCL connects now, where an error is still clear.
                on = device if device.type == "cuda" else None
                dist.init_process_group(
                    backend, rank=info.rank, world_size=info.world_size, timeout=self.timeout, device_id=on
                )
            except (RuntimeError, ValueError) as error:
                remedy = "Start the job with torchrun; MASTER_ADDR and MASTER_PORT must be reachable from every rank."
                raise MachineError(
                    f"the {info.world_size} ranks cannot connect: {str(error).splitlines()[0]}", remedy
                ) from error
            self._began = True

    @property
    def alone(self) -> bool:
        """Whether there is only this rank."""
        return self.info.world_size == 1

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which prints and writes for all."""
        return self.info.rank == 0

    def agree(self, flags: Sequence[float]) -> list[float]:
        """The maximum of each flag over all ranks, exchanged between the hosts; no GPU is waited for."""
        if self.alone:
            return list(flags)
        shared = torch.tensor(flags, dtype=torch.float64)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        agreed: list[float] = shared.tolist()
        return agreed

    def gather(self, value: Any) -> list[Any]:
        """Every rank's plain value, by rank."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.info.world_size
        dist.all_gather_object(values, value)
        return values

    def copy_from_first(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite ``tensors`` with the first rank's."""
        if not self.alone:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), src=0)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.agree([0.0])

    def close(self, *, failed: bool = False) -> None:
        """Leave the process group, if it was formed here.

        Not after a failure of this rank under NCCL, which would wait for collectives that the others never join.
        """
        if self._began and dist.is_initialized() and not (failed and self.device.type == "cuda"):
            dist.destroy_process_group()


def lost_contact(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone."""
    signs = ("closed by peer", "reset by peer", "Broken pipe", "gloo/transport", "NCCL", "TCPStore")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def bit_hash(tensors: Sequence[torch.Tensor]) -> int:
    """A 52-bit hash of the exact bits of ``tensors``, so that it fits into a float64 unchanged."""
    if not tensors:
        return 0
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for tensor in tensors:
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        # In pieces: the 64-bit products take several times the memory of the weights.
        for piece in tensor.detach().contiguous().reshape(-1).view(whole).split(2**22):  # type: ignore[no-untyped-call, unused-ignore]
            places = torch.arange(1, piece.numel() + 1, device=piece.device)
            total = total * 31 + (piece * places).sum()
    return int(total) % 2**52


# --------------------------------------------------------------------------- one process, DDP


# A part of a batch, with its number of samples.
Piece = tuple[Any, int]


class LossModule(torch.nn.Module):
    """The loss with the model inside it."""

    def __init__(self, model: torch.nn.Module, compiled: Callable[..., Any], loss: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self._compiled = (compiled,)  # in a tuple: as a submodule it would list every weight twice

    def forward(self, piece: Any, loss: Any = None) -> Any:
        """The job's loss of ``piece``, or ``loss``. None for no data: a zero that depends on every weight."""
        return zero_loss(self.model.parameters()) if piece is None else (loss or self.loss)(self._compiled[0], piece)  # type: ignore[arg-type]


def zero_loss(parameters: Any) -> torch.Tensor:
    """A zero whose backward reaches each of ``parameters`` and adds nothing to its gradient."""
    return torch.stack([parameter.sum().float() * 0 for parameter in parameters if parameter.requires_grad]).sum()


class SingleProcess:
    """Forward and backward of a step in one process; the subclasses do it with DDP and FSDP.

    Losses are multiplied by ``divisor`` before. ``lockstep``: every forward needs all ranks, also those without data,
    and cannot be repeated after a failure. ``left_out``: some parameters took no part in this rank's step.
    ``saving``: the CPU mesh of ranks that each save their own shards.
    """

    lockstep = False
    left_out = False
    saving: DeviceMesh | None = None

    def __init__(self, whole: LossModule, group: Group) -> None:
        self._whole, self._group = whole, group
        self.divisor = group.info.world_size
        self._parameters: Sequence[torch.nn.Parameter] = ()

    def use(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Train these from now on; others lose their gradient, so that they do not move. All ranks take part."""
        for parameter in self._parameters:
            parameter.grad = None
        self._parameters = parameters

    def pieces(self, own: list[Piece]) -> list[Piece]:
        """What this rank computes in a step."""
        return own

    def zero_gradients(self) -> None:
        """Clear the gradients, at the begin of a step."""
        for parameter in self._parameters:
            parameter.grad = None

    def loss_of(self, piece: Any, *, last: bool) -> Any:  # noqa: ARG002 - DDP waits for the last
        """What the job's loss returns for ``piece``; ``last``: it is the last of its step."""
        return self._whole(piece)

    def evaluate(self, loss: Any, piece: Any) -> Any:
        """What ``loss`` returns for ``piece``, without gradients."""
        return self._whole(piece, loss)

    def finish(self, loss: torch.Tensor) -> None:
        """After the last backward, or a failed one: complete the gradient exchange, and average ``loss`` in place."""
        if not self._group.alone:
            dist.all_reduce(loss)
            loss /= self.divisor

    def forget_left_out(self) -> None:
        """Set the gradient of parameters that no rank used to None, as in one process. All ranks take part."""

    def norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """The norm of all gradients together."""
        return torch.nn.utils.get_total_norm(gradients)


class Replicated(SingleProcess):
    """Replicas under DistributedDataParallel, which survive a failed backward.

    DDP sums the gradients bucket by bucket during backward, and would wait for ever when one rank runs out of memory,
    has no sample in a step, or leaves a parameter out. That rank completes the buckets with the backward of a zero
    loss over the missing parameters; then all ranks learn of the failure and repeat the step.
    """

    def __init__(self, whole: LossModule, group: Group) -> None:
        super().__init__(whole, group)
        self._ddp: Any = None
        self._hooks: list[Any] = []
        self._missing: set[int] = set()
        self._unused: set[int] = set()
        self._summing = False

    def use(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """See SingleProcess. DDP is made anew, because it takes the trainable parameters when it is made."""
        super().use(parameters)
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            p.register_post_accumulate_grad_hook(lambda _, index=index: self._missing.discard(index))  # type: ignore[misc, no-untyped-call, unused-ignore]
            for index, p in enumerate(parameters)
        ]
        self._ddp = None  # the old one removes its hooks
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.15 has a new name for the next line
            self._ddp = DistributedDataParallel(
                self._whole,
                broadcast_buffers=False,  # done before evaluations and saves
                gradient_as_bucket_view=True,
                init_sync=False,  # done in `build`
            )
        # DDP rebuilds its buckets after the first backward, on which sums over three or more ranks depend in the last
        # bit. Rebuilt before the first step, a resumed run equals one without interruption.
        for _ in range(2):
            self._ddp(None).backward()

    def zero_gradients(self) -> None:
        """See SingleProcess. Gradients stay views of DDP's buckets."""
        self._summing = False
        torch._foreach_zero_([p.grad for p in self._parameters if p.grad is not None])

    def loss_of(self, piece: Any, *, last: bool) -> Any:
        """See SingleProcess."""
        self._ddp.require_backward_grad_sync = last  # what DDP's no_sync() sets
        outcome = self._ddp(piece)
        if last:
            self._missing = set(range(len(self._parameters)))
            self._summing = True
        return outcome

    def finish(self, loss: torch.Tensor) -> None:
        """See SingleProcess."""
        if self._summing:
            self._unused = set(self._missing)
            if self._unused:
                zero_loss(self._parameters[index] for index in sorted(self._unused)).backward()  # type: ignore[no-untyped-call, unused-ignore]
        else:
            self._unused = set(range(len(self._parameters)))
            self.loss_of(None, last=True).backward()
        self.left_out = bool(self._unused)
        super().finish(loss)

    def forget_left_out(self) -> None:
        """See SingleProcess."""
        used = self._group.agree([float(index not in self._unused) for index in range(len(self._parameters))])
        for parameter, somewhere in zip(self._parameters, used, strict=True):
            if not somewhere:
                parameter.grad = None


# --------------------------------------------------------------------------- FSDP


# Smaller blocks are gathered with their neighbours: many small messages are slower than one.
LEAST_BLOCK_PARAMETERS = 100_000


class Sharded(SingleProcess):
    """The model sharded over the ranks by FSDP2, for one that does not fit into one GPU.

    Each block is gathered for its own forward and backward only, so every forward needs all ranks: ranks with fewer
    pieces in a step repeat one with a weight of zero. When a rank runs out of memory, the run ends and can be resumed
    with smaller batches; a step cannot be repeated as with DDP.
    """

    lockstep = True

    def __init__(self, whole: LossModule, group: Group) -> None:
        super().__init__(whole, group)
        from torch.distributed.fsdp import fully_shard  # takes its time to import

        mesh = init_device_mesh(group.device.type, (group.info.world_size,))
        for block in blocks(whole.model):
            fully_shard(block, mesh=mesh)
        self._root = fully_shard(whole, mesh=mesh)
        # Saves run on a thread of their own, with a process group of its own beside the training's collectives.
        agreeing: Any = dist.new_group(backend="gloo", timeout=group.timeout)
        self.saving = DeviceMesh.from_group(agreeing, "cpu")

    def pieces(self, own: list[Piece]) -> list[Piece]:
        """See SingleProcess. Every rank gets as many as the one with the most; a rank without any borrows one."""
        most, fewest = (int(abs(count)) for count in self._group.agree([len(own), -len(own)]))
        spare = own[-1][0] if own else None
        if fewest == 0:
            lent = [own[0][0] if own else None]
            dist.broadcast_object_list(lent, src=self._group.gather(len(own)).index(most))
            spare = spare if own else lent[0]
        return [*own, *[(spare, 0)] * (most - len(own))]

    def evaluate(self, loss: Any, piece: Any) -> Any:
        """See SingleProcess."""
        outcome = self._whole(piece, loss)
        self._root.reshard()  # the root stays gathered until a backward, which does not follow here
        return outcome

    def norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """See SingleProcess."""
        squared = torch.nn.utils.get_total_norm([local_shard(gradient) for gradient in gradients]).square()
        dist.all_reduce(squared)
        return squared.sqrt()


def blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules to shard, inner ones first: large members of the model's ModuleLists and Sequentials.

    Transformers and convolutional networks keep their blocks there. Single layers count where there are no blocks.
    Everything else is sharded with the root.
    """
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList | torch.nn.Sequential)]
    members = list(dict.fromkeys(child for parent in lists for child in parent.children()))
    large = [m for m in members if sum(p.numel() for p in m.parameters()) >= LEAST_BLOCK_PARAMETERS]
    depth = {module: name.count(".") for name, module in model.named_modules()}
    return sorted([m for m in large if any(m.children())] or large, key=lambda m: -depth[m])


# --------------------------------------------------------------------------- shards in the checkpoint


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a whole ``tensor``, sharded as ``like`` is; without communication."""
    if not isinstance(like, DTensor) or isinstance(tensor, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


# --------------------------------------------------------------------------- `fulltilt train --gpus N`


_TICK_S = 0.1
# How long the other ranks may take to end after one has failed.
_PATIENCE_S = 30.0


def relaunch(gpus: int, device: str = "auto", command: Sequence[str] | None = None) -> int | None:
    """Run ``command`` (by default our own) as ``gpus`` ranks on this machine and return the exit code of the job.

    None means to train in this process, for one GPU or under a launcher. Raises UsageError.
    """
    if gpus < 1:
        raise UsageError(f"gpus should be at least 1, not {gpus}")
    if gpus == 1 or rank_from_env().world_size > 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        return None
    device_of(device, gpus - 1)  # refuses more ranks than there are GPUs
    return _run_ranks(list(command or [sys.executable, *sys.orig_argv[1:]]), gpus)


def _run_ranks(command: list[str], world_size: int) -> int:
    """Start the ranks, wait for them and return the code of the first one that fails.

    torchrun's agent would keep signals to itself and return 1 for every failure.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "OMP_NUM_THREADS": str(max(int(cpu_capacity().usable) // world_size, 1)),  # by default each would use all CPUs
        **os.environ,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
    }
    ranks: list[subprocess.Popen[bytes]] = []
    failed: int | None = None
    kill_at_s = math.inf

    def pass_on(number: int, _frame: object) -> None:  # the ranks decide: they save and exit 3
        for rank in ranks:
            rank.send_signal(number)

    with stop_signals_to(pass_on):
        try:
            for number in range(world_size):
                env = {**shared, "RANK": str(number), "LOCAL_RANK": str(number)}
                # In a session of its own, so that Ctrl-C reaches it once, through us.
                ranks.append(subprocess.Popen(command, env=env, start_new_session=True))
            while None in (codes := [rank.poll() for rank in ranks]):
                if failed is None and (failed := next(filter(None, codes), None)) is not None:
                    pass_on(signal.SIGTERM, None)
                    kill_at_s = time.monotonic() + _PATIENCE_S
                if time.monotonic() > kill_at_s:
                    break
                time.sleep(_TICK_S)
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
                    rank.wait()
    code = failed or next(filter(None, codes), 0)
    return 128 - code if code < 0 else code
