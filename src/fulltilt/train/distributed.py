"""Ranks under torchrun or Slurm: who we are, what our part of the totals is, and how the ranks agree."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fulltilt.errors import MachineError, UsageError
from fulltilt.train import slurm
from fulltilt.train.meeting import own_store

_AFTER_THE_WATCHDOG_S = 30.0


@dataclass(frozen=True, slots=True)
class Ranks:
    """Our place among the processes of the job."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1


def detect(environment: Mapping[str, str] | None = None) -> Ranks:
    """Our place as torchrun states it, or Slurm's srun where torchrun is not in between; otherwise one process."""
    env = os.environ if environment is None else environment
    if "RANK" not in env or "WORLD_SIZE" not in env:
        env = slurm.torch_environment(env)
    defaults = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    try:
        return Ranks(*(int(env.get(name, default)) for name, default in defaults.items()))
    except ValueError as error:
        raise UsageError(f"the launcher's {', '.join(defaults)} are not numbers") from error


def device_of(name: str, local_rank: int) -> torch.device:
    """The device that a rank trains on. Raises UsageError when a GPU is asked for and there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("device: cuda, but torch sees no GPU", "Use device: auto, or see `fulltilt check`.")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    present = torch.cuda.device_count()
    if local_rank < present:
        return torch.device("cuda", local_rank)
    if present == 1 and "SLURM_LOCALID" in os.environ:
        return torch.device("cuda", 0)  # srun --gpus-per-task=1 shows each rank its own GPU only
    raise UsageError(
        f"this machine has {present} GPUs for {local_rank + 1} or more ranks", "Start one rank a GPU, or device: cpu."
    )


def part_of(total: int, ranks: Ranks) -> int:
    """Our part of a total (workers, samples of a batch): parts differ by at most one and add up to the total."""
    return total * (ranks.rank + 1) // ranks.world - total * ranks.rank // ranks.world


def divided(batch_size: int, workers: int, ranks: Ranks) -> str:
    """How the totals are shared out, in words. Raises UsageError when a rank would get nothing to do."""
    if batch_size < ranks.world:
        raise UsageError(f"batch_size {batch_size} cannot be divided among {ranks.world} ranks", "Raise batch_size.")
    batches, helpers = (_of_each(total, ranks) for total in (batch_size, workers))
    return f"batch {batch_size} = {ranks.world} ranks × {batches}; workers {workers} = {helpers} a rank"


def _of_each(total: int, ranks: Ranks) -> str:
    each, rest = divmod(total, ranks.world)
    return f"{each} or {each + 1}" if rest else f"{each}"


def device_lines(devices: Sequence[str]) -> list[str]:
    """Which GPUs train, in the words of the guides (row V9)."""
    if not devices:
        return []
    noun = "GPU" if len(devices) == 1 else "GPUs"
    return [f"Using {len(devices)} {noun} for training", *(f"GPU {i}: {name}" for i, name in enumerate(devices))]


class Group:
    """The ranks of the job as one. With a single rank every call returns at once."""

    def __init__(self, ranks: Ranks, device: torch.device, timeout_s: float) -> None:
        self.ranks = ranks
        self.device = device
        self._began = False
        if not self.alone and not dist.is_initialized():
            # CPU tensors go through gloo: flags can be agreed upon without waiting for any GPU.
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            # Our own watchdog should be first: it writes the stacks. NCCL's would abort without a word for the user.
            timeout = datetime.timedelta(seconds=timeout_s + _AFTER_THE_WATCHDOG_S)
            try:
                dist.init_process_group(
                    backend,
                    store=own_store(ranks.rank, ranks.world, timeout),
                    rank=ranks.rank,
                    world_size=ranks.world,
                    timeout=timeout,
                    # Connects at once, where a failure can still be told; and no collective has to guess its GPU.
                    device_id=device if device.type == "cuda" else None,
                )
            except (RuntimeError, ValueError) as error:
                remedy = "Start the job with torchrun; MASTER_ADDR and MASTER_PORT must be reachable from every rank."
                raise MachineError(
                    f"the {ranks.world} ranks cannot meet: {str(error).splitlines()[0]}", remedy
                ) from error
            self._began = True

    @property
    def alone(self) -> bool:
        """There is only this rank."""
        return self.ranks.world == 1

    @property
    def first(self) -> bool:
        """This rank speaks and writes for all."""
        return self.ranks.rank == 0

    def agree(self, flags: Sequence[float]) -> list[float]:
        """The largest of each flag over all ranks. Host to host; the GPUs run on."""
        if self.alone:
            return list(flags)
        shared = torch.tensor(flags, dtype=torch.float64)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        agreed: list[float] = shared.tolist()
        return agreed

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum ``tensor`` over the ranks, in place."""
        if not self.alone:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Every rank's plain value, by rank."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.ranks.world
        dist.all_gather_object(values, value)
        return values

    def from_first(self, value: Any) -> Any:
        """The first rank's plain value."""
        return self.gather(value)[0]

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


def same_everywhere(parameters: Sequence[torch.Tensor], group: Group) -> bool:
    """Whether all ranks hold the same parameters bit for bit, by comparing a hash of their bits.

    The hash is computed on the device; only 8 bytes travel. Waits for the device.
    """
    if group.alone:
        return True
    own = float(bit_hash(parameters))
    largest, smallest = group.agree([own, -own])
    return largest == -smallest


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
