"""Sharded checkpoints with torch.distributed.checkpoint: each rank writes its shards, any number of ranks reads them.

Imported on first use: torch.distributed.checkpoint is slow to import.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import empty as empty_shards
from torch.futures import Future

from fulltilt.errors import FulltiltError, MachineError
from fulltilt.store import open_plain
from fulltilt.train import checkpoint_format
from fulltilt.train.checkpoint_format import SHARDS_FILE, FileSum

_RANK_FILE = "__{rank}_0.distcp"  # torch's own name
_SUMS = MetadataIndex("sums of files")


class _Writer(FileSystemWriter):
    """The first rank makes the folder (``begin``, with the names of all files) and gives it its name (``complete``).

    Both run in methods whose errors torch raises on all ranks.
    """

    def __init__(
        self, folder: Path, begin: Callable[[Sequence[str]], None], complete: Callable[[dict[str, FileSum]], None]
    ) -> None:
        super().__init__(folder)
        self._folder, self._begin, self._complete = folder, begin, complete

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan  # torch would make the folder here, on every rank

    def prepare_global_plan(self, plans: list[Any]) -> Any:
        shards = [_RANK_FILE.format(rank=rank) for rank in range(len(plans))]
        self._begin([*shards, SHARDS_FILE, f"{SHARDS_FILE}.tmp"])
        return super().prepare_global_plan(plans)

    def write_data(self, plan: Any, planner: Any) -> Future[list[WriteResult]]:
        written = list(super().write_data(plan, planner).wait())
        names = {result.storage_data.relative_path for result in written}
        sums = {name: checkpoint_format.hash_file(self._folder / name) for name in names}
        future: Future[list[WriteResult]] = Future()
        future.set_result([*written, WriteResult(_SUMS, 0, sums)])  # torch sends it to the first rank with the rest
        return future

    def finish(self, metadata: Any, results: list[list[WriteResult]]) -> None:
        sums = {name: one for result in results for name, one in result.pop().storage_data.items()}
        super().finish(metadata, results)
        self._complete({**sums, SHARDS_FILE: checkpoint_format.hash_file(self._folder / SHARDS_FILE)})

    def storage_meta(self) -> None:
        """Nothing: torch would store the folder's path, which changes."""


def write(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup,
    begin: Callable[[Sequence[str]], None],
    complete: Callable[[dict[str, FileSum]], None],
) -> None:
    """Write this rank's shards of ``tensors``, and replicated tensors once. All ranks take part.

    Raises what went wrong on any rank: a FulltiltError, an OSError, or MachineError for the rest.
    """
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    try:
        save(dict(tensors), storage_writer=_Writer(folder, begin, complete), planner=planner, process_group=group)
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        if isinstance(cause, FulltiltError | OSError):
            raise cause from None
        raise MachineError(f"rank {rank} did not write its shards: {type(cause).__name__}: {cause}") from cause


# --------------------------------------------------------------------------- reading


class _MetadataUnpickler(pickle.Unpickler):
    """Loads torch's descriptions of tensors and nothing else: a foreign checkpoint must not run code."""

    def find_class(self, module: str, name: str) -> Any:
        found = None if "." in name else super().find_class(module, name)
        described = isinstance(found, type) and found.__module__ == module == MetadataIndex.__module__
        own = ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch.serialization", "_get_layout")
        if described or (module, name) in own or found is torch.Size or isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a checkpoint")


class _Reader(FileSystemReader):
    def read_metadata(self, *_: Any, **__: Any) -> Any:
        with open_plain(Path(self.path) / SHARDS_FILE) as file:
            return _MetadataUnpickler(file).load()


def read(
    folder: Path, files: Collection[str], model: Mapping[str, torch.Tensor], prefix: str
) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint: this rank's shards where ``model`` is sharded, else whole.

    Only ``files`` are read; names of the model's tensors begin with ``prefix``. Raises OSError, ValueError.
    """
    mesh = next((tensor.device_mesh for tensor in model.values() if isinstance(tensor, DTensor)), None)
    reader, tensors = _Reader(folder), {}
    try:
        metadata = reader.read_metadata()
        if not {place.relative_path for place in metadata.storage_data.values()} <= set(files):
            raise ValueError("it names files that are not in the manifest")
        for name, saved in metadata.state_dict_metadata.items():
            whole = name.startswith(prefix) and not isinstance(model.get(name.removeprefix(prefix)), DTensor)
            size, dtype = saved.size, saved.properties.dtype
            if mesh is None or whole:
                tensors[name] = torch.empty(size, dtype=dtype)
            else:  # fully_shard divides along the first dimension
                tensors[name] = empty_shards(*size, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about loading without a process group, as meant
            load(tensors, storage_reader=reader, no_dist=True)
    except OSError:
        raise
    except (Exception, CheckpointException) as error:
        raise ValueError(f"{SHARDS_FILE} or a shard: {error}") from error
    return tensors
