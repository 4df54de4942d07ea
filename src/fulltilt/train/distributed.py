"""Ranks: who we are under torchrun, how they meet and agree, how gradients come together (DDP, FSDP2); `--gpus N`."""

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
    """Our place among the processes of the job."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0


def rank_from_env(environment: Mapping[str, str] | None = None) -> RankInfo:
    """Our place as torchrun states it; otherwise one process. Raises UsageError under srun without torchrun."""
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
    """The device that a rank trains on. Raises UsageError when a GPU is asked for and there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("device: cuda, but torch sees no GPU", "Use device: auto, or see `fulltilt check`.")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= (present := torch.cuda.device_count()):
        what = f"torch sees {count('GPU', present)} for {local_rank + 1} or more ranks"
        raise UsageError(what, "Start one rank a GPU, or use device: cpu; see `fulltilt check`.")
    return torch.device("cuda", local_rank)


def part_of(total: int, info: RankInfo) -> int:
    """Our part of a total (workers, samples of a batch): parts differ by at most one and add up to the total."""
    return total * (info.rank + 1) // info.world_size - total * info.rank // info.world_size


def divided(batch_size: int, workers: int, info: RankInfo) -> str:
    """How the totals are shared out, in words. Raises UsageError when a rank would get nothing to do."""
    if batch_size < info.world_size:
        raise UsageError(
            f"batch_size {batch_size} cannot be divided among {info.world_size} ranks", "Raise batch_size."
        )
    shares = (divmod(total, info.world_size) for total in (batch_size, workers))
    batches, helpers = (f"{each} or {each + 1}" if rest else str(each) for each, rest in shares)
    return f"batch {batch_size} = {info.world_size} ranks × {batches}; workers {workers} = {helpers} a rank"


class Group:
    """The ranks of the job as one. With a single rank every call returns at once."""

    def __init__(self, info: RankInfo, device: torch.device, timeout_s: float) -> None:
        self.info = info
        self.device = device
        # Our own watchdog should be first: it writes the stacks. NCCL's would abort without a word for the user.
        self.timeout = datetime.timedelta(seconds=timeout_s + _AFTER_THE_WATCHDOG_S)
        self._began = False
        if not self.alone and not dist.is_initialized():
            # CPU tensors go through gloo: flags can be agreed upon without waiting for any GPU.
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            try:
                # With a device it connects at once, where a failure can still be told.
                on = device if device.type == "cuda" else None
                dist.init_process_group(
                    backend, rank=info.rank, world_size=info.world_size, timeout=self.timeout, device_id=on
                )
            except (RuntimeError, ValueError) as error:
                remedy = "Start the job with torchrun; MASTER_ADDR and MASTER_PORT must be reachable from every rank."
                raise MachineError(
                    f"the {info.world_size} ranks cannot meet: {str(error).splitlines()[0]}", remedy
                ) from error
            self._began = True

    @property
    def alone(self) -> bool:
        """There is only this rank."""
        return self.info.world_size == 1

    @property
    def first(self) -> bool:
        """This rank speaks and writes for all."""
        return self.info.rank == 0

    def agree(self, flags: Sequence[float]) -> list[float]:
        """The largest of each flag over all ranks. Host to host; the GPUs run on."""
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
        """Leave the group, if we were the ones to form it.

        After a failure of this rank NCCL is left as it is: it would wait here for collectives that others never join.
        """
        if self._began and dist.is_initialized() and not (failed and self.device.type == "cuda"):
            dist.destroy_process_group()


def lost_contact(error: BaseException) -> bool:
    """True for a collective that failed because another rank has gone."""
    signs = ("closed by peer", "reset by peer", "Broken pipe", "gloo/transport", "NCCL", "TCPStore")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def bit_hash(tensors: Sequence[torch.Tensor]) -> int:
    """A 52-bit hash of the exact bits of ``tensors``, so that it fits into a float64 unchanged."""
    if not tensors:
        return 0
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for tensor in tensors:
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        # In pieces: the 64-bit products would otherwise take several times the memory of the weights.
        for piece in tensor.detach().contiguous().reshape(-1).view(whole).split(2**22):  # type: ignore[no-untyped-call, unused-ignore]
            places = torch.arange(1, piece.numel() + 1, device=piece.device)
            total = total * 31 + (piece * places).sum()
    return int(total) % 2**52


# --------------------------------------------------------------------------- where weights and gradients are


# A part of a batch, with its number of samples.
Piece = tuple[Any, int]


class LossModule(torch.nn.Module):
    """The loss with the model inside it."""

    def __init__(self, model: torch.nn.Module, compiled: Callable[..., Any], loss: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self._compiled = (compiled,)  # in a tuple: as a module of ours it would bring every weight a second time

    def forward(self, piece: Any, loss: Any = None) -> Any:
        """The job's loss of ``piece``, or another. None stands for no data: a zero that every weight takes part in."""
        return zero_loss(self.model.parameters()) if piece is None else (loss or self.loss)(self._compiled[0], piece)  # type: ignore[arg-type]


def zero_loss(parameters: Any) -> torch.Tensor:
    """A zero whose backward adds nothing to the gradient of each of ``parameters``, but reaches all of them."""
    return torch.stack([parameter.sum().float() * 0 for parameter in parameters if parameter.requires_grad]).sum()


class SingleProcess:
    """How the gradients of a step come together in one process; DDP and FSDP change what several ranks do.

    Losses go in multiplied by ``divisor``. With ``lockstep`` every forward needs all ranks at once, also those without
    data, and one that failed cannot be repeated. ``left_out``: this rank left some parameters out of its step.
    ``saving``: the ranks that each save their own part of the model, on their hosts.
    """

    divisor = 1
    lockstep = False
    left_out = False
    saving: DeviceMesh | None = None

    def __init__(self, whole: LossModule) -> None:
        self._whole = whole
        self._parameters: Sequence[torch.nn.Parameter] = ()

    def use(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """These are trained from now on. All ranks take part; what is frozen now must not move by its last gradient."""
        for parameter in self._parameters:
            parameter.grad = None
        self._parameters = parameters

    def pieces(self, own: list[Piece]) -> list[Piece]:
        """What this rank computes in a step."""
        return own

    def zero_gradients(self) -> None:
        """Begin a step."""
        for parameter in self._parameters:
            parameter.grad = None

    def loss_of(self, piece: Any, *, last: bool) -> Any:  # noqa: ARG002 - DDP waits for the last
        """What the job's loss says about ``piece``; ``last``: it is the last of its step."""
        return self._whole(piece)

    def evaluate(self, loss: Any, piece: Any) -> Any:
        """What ``loss`` says about ``piece``, without gradients."""
        return self._whole(piece, loss)

    def finish(self, loss: torch.Tensor) -> None:
        """After the last backward, or one that failed: complete the exchange, and average ``loss`` in place."""
        if self.divisor > 1:
            dist.all_reduce(loss)
            loss /= self.divisor

    def forget_left_out(self) -> None:
        """Take the gradient from parameters that every rank left out, as in one process. All ranks take part."""

    def norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """The norm of all gradients together."""
        return torch.nn.utils.get_total_norm(gradients)


class Replicated(SingleProcess):
    """Replicas on all ranks, kept alike by DistributedDataParallel; a backward that failed does not end them.

    DDP sums the gradients bucket by bucket while backward still runs, and waits for a bucket that never comes when one
    rank runs out of memory, has no sample in a step, or leaves a parameter out. Such a rank completes the round with a
    backward of nothing through the parameters that are missing; then all learn of the failure and do the step again.
    """

    def __init__(self, whole: LossModule, group: Group) -> None:
        super().__init__(whole)
        self.divisor = group.info.world_size
        self._group = group
        self._ddp: Any = None
        self._hooks: list[Any] = []
        self._missing: set[int] = set()
        self._unused: set[int] = set()
        self._summing = False

    def use(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """See SingleProcess. DDP takes the trainable parameters as they are when it is made."""
        super().use(parameters)
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            p.register_post_accumulate_grad_hook(lambda _, index=index: self._missing.discard(index))  # type: ignore[misc, no-untyped-call, unused-ignore]
            for index, p in enumerate(parameters)
        ]
        self._ddp = None  # the one before lets go of its hooks
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.15 has a new name for the next line
            self._ddp = DistributedDataParallel(
                self._whole,
                broadcast_buffers=False,  # the engine does, when it evaluates or saves
                gradient_as_bucket_view=True,
                init_sync=False,  # the engine has given every rank the same weights
            )
        # DDP settles its buckets after the first backward. Sums over three or more ranks depend on them in the last
        # bit, so they have to be settled before the first step: a resumed run would differ from one that went on.
        for _ in range(2):
            self._ddp(None).backward()

    def zero_gradients(self) -> None:
        """See SingleProcess. They stay views of DDP's buckets."""
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


# --------------------------------------------------------------------------- the sharded model


# Below this a block is gathered together with its neighbours: many small messages are slower than one.
LEAST_BLOCK_PARAMETERS = 100_000


class Sharded(SingleProcess):
    """The model divided among the ranks, block by block, for one that does not fit into one GPU.

    Each block is made whole for its own forward and backward only. Every forward therefore needs all ranks at once:
    ranks with less to do in a step repeat a piece of it at a weight of zero. A rank that runs out of memory cannot be
    waited for within a step, unlike with replicas: the run ends, and resumes with smaller pieces.
    """

    lockstep = True

    def __init__(self, whole: LossModule, group: Group) -> None:
        super().__init__(whole)
        self.divisor = group.info.world_size
        self._group = group
        from torch.distributed.fsdp import fully_shard  # takes its time to import

        mesh = init_device_mesh(group.device.type, (group.info.world_size,))
        for block in blocks(whole.model):
            fully_shard(block, mesh=mesh)
        self._root = fully_shard(whole, mesh=mesh)
        # They agree on a save from a thread beside the training, whose own collectives must not come in between.
        agreeing: Any = dist.new_group(backend="gloo", timeout=group.timeout)
        self.saving = DeviceMesh.from_group(agreeing, "cpu")

    def pieces(self, own: list[Piece]) -> list[Piece]:
        """See SingleProcess. As many as the rank with the most of them has; a rank without any borrows one."""
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
        self._root.reshard()  # what belongs to no block stays whole until a backward, and here none follows
        return outcome

    def norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """See SingleProcess."""
        squared = torch.nn.utils.get_total_norm([local_shard(gradient) for gradient in gradients]).square()
        dist.all_reduce(squared)
        return squared.sqrt()


def blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """What is gathered at a time, inner ones first: members of the model's lists and sequences that are large enough.

    That is how transformers and convolutional networks keep their blocks. Single layers count where there are no
    blocks. What is in none of them is gathered with the whole.
    """
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList | torch.nn.Sequential)]
    members = list(dict.fromkeys(child for parent in lists for child in parent.children()))
    large = [m for m in members if sum(p.numel() for p in m.parameters()) >= LEAST_BLOCK_PARAMETERS]
    depth = {module: name.count(".") for name, module in model.named_modules()}
    return sorted([m for m in large if any(m.children())] or large, key=lambda m: -depth[m])


# --------------------------------------------------------------------------- shards in the checkpoint


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor. Changes of it are changes of the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Our part of a whole ``tensor``, as ``like`` is divided among the ranks; no other rank is asked."""
    if not isinstance(like, DTensor) or isinstance(tensor, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


# --------------------------------------------------------------------------- `fulltilt train --gpus N`


_TICK_S = 0.1
# How long ranks have to end by themselves after another one has failed.
_PATIENCE_S = 30.0


def relaunch(gpus: int, device: str = "auto", command: Sequence[str] | None = None) -> int | None:
    """Run ``command`` (by default our own) as ``gpus`` ranks on this machine and return the exit code of the whole.

    None means: train in this process; one GPU is enough, or a launcher has started the ranks. Raises UsageError.
    """
    if gpus < 1:
        raise UsageError(f"gpus should be at least 1, not {gpus}")
    if gpus == 1 or rank_from_env().world_size > 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        return None
    device_of(device, gpus - 1)  # refuses more ranks than there are GPUs
    return _run_ranks(list(command or [sys.executable, *sys.orig_argv[1:]]), gpus)


def _run_ranks(command: list[str], world_size: int) -> int:
    """Start the ranks and wait for them. The code of the first one that fails is the code of the job.

    torchrun's own agent would take the signals for itself and answer every failure with code 1.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "OMP_NUM_THREADS": str(max(int(cpu_capacity().usable) // world_size, 1)),  # left alone each would take all CPUs
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
                # In a session of its own: Ctrl-C in the terminal comes through us, once.
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
