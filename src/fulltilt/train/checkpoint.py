"""Checkpoints of a run: writing one, finding the newest intact one, deleting old ones."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import re
import resource
import shutil
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fulltilt import store
from fulltilt.errors import ForeignFiles, FulltiltError, MachineError
from fulltilt.store.run_folder import TRAINING
from fulltilt.train import checkpoint_format
from fulltilt.train.checkpoint_format import SHARDS_FILE, FileSum, refusals_told
from fulltilt.train.distributed import RankInfo, local_shard, lost_contact


@dataclass(frozen=True, slots=True)
class KeepPolicy:
    """Keep the ``last`` newest and the ``best`` ones by metric; ``mode`` says whether higher or lower is better."""

    last: int = 2
    best: int = 1
    mode: Literal["max", "min"] = "max"


# --------------------------------------------------------------------------- the format


SCHEMA_VERSION = 1
MODEL_FILE = "model.safetensors"
TENSORS_FILE = "state.safetensors"
VALUES_FILE = "state.json"
MANIFEST_FILE = "manifest.json"
METRICS_FILE = "metrics.csv"
# What a training writes into OUT besides its run record.
RESERVED = ("checkpoints", METRICS_FILE, "error.log", "profile")
_NAME = re.compile(r"step-(\d{8,})")
_ALONE = RankInfo()
_MODEL = "model."  # before the names of the model's tensors, among the shards


class DamagedCheckpoint(MachineError):  # noqa: N818 - reads as the thing it is
    """A checkpoint folder fails its checksums. The message names the file."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a run at one step, copied to the host and ready to be written; with FSDP this rank's shards."""

    step: int
    epoch: int
    metric: float | None
    model: Mapping[str, torch.Tensor]
    tensors: Mapping[str, torch.Tensor]
    values: Any

    @property
    def size_bytes(self) -> int:
        """How many bytes its checkpoint takes on the disk, without the manifest."""
        values = len(json.dumps(self.values))
        return checkpoint_format.tensor_bytes(self.model) + checkpoint_format.tensor_bytes(self.tensors) + values


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on the disk, as its manifest describes it."""

    folder: Path
    step: int
    epoch: int
    metric: float | None


def steps_to_delete(checkpoints: Collection[Checkpoint], policy: KeepPolicy) -> list[int]:
    """The steps whose checkpoints are deleted, oldest first; the newest always stays."""
    by_age = sorted(checkpoints, key=lambda c: c.step)
    kept = {*by_age[-max(policy.last, 1) :], *best_first(checkpoints, policy.mode)[: policy.best]}
    return [c.step for c in by_age if c not in kept]


def best_first(checkpoints: Collection[Checkpoint], mode: Literal["max", "min"]) -> list[Checkpoint]:
    """The checkpoints with a metric, the best first; of equal ones the older."""
    sign = -1.0 if mode == "max" else 1.0
    rated = [(sign * c.metric, c.step, c) for c in checkpoints if c.metric is not None and not math.isnan(c.metric)]
    return [checkpoint for _, _, checkpoint in sorted(rated, key=lambda one: one[:2])]


def folder_name(step: int) -> str:
    """The name of the folder of a step's checkpoint."""
    return f"step-{step:08d}"


# --------------------------------------------------------------------------- writing


def claim(out: Path) -> store.OwnedFolder:
    """Claim the output folder of a training. Raises ForeignFiles with the list, UsageError, MachineError."""
    folder = store.OwnedFolder.claim(out, TRAINING)
    store.create_folder(out, RESERVED)
    return folder


def prepare(root: Path) -> None:
    """Make ``root`` in the claimed folder, check that it can be written, and clean up after a killed run.

    Unfinished and half-deleted folders are removed; a displaced checkpoint comes back if its successor was not
    finished. Raises ForeignFiles, MachineError.
    """
    folder = _owner(root)
    with refusals_told(root):
        folder.make(root)
        folder.remove(folder.make(folder.temporary(root / "probe")))
        for path in sorted(root.glob(".displaced-step-*")):
            _settle(path, root / path.name[len(".displaced-") :].partition(".")[0])
        for path in root.glob(".*.tmp"):
            _discard(path)


def write(root: Path, snapshot: Snapshot) -> Checkpoint:
    """Write a checkpoint: under its name it is complete or absent. Raises MachineError."""
    partial = _hidden(root, snapshot.step)
    try:
        with refusals_told(partial, snapshot.size_bytes):
            _begin(partial, [MODEL_FILE])
            parts = checkpoint_format.tensor_parts(snapshot.model)
            return _complete(partial, snapshot, {MODEL_FILE: checkpoint_format.write_file(partial / MODEL_FILE, parts)})
    finally:
        _discard(partial)


def write_shards(root: Path, snapshot: Snapshot, group: dist.ProcessGroup) -> Checkpoint | None:
    """Like ``write``, by all ranks of ``group`` at once: each writes its shards, the first the rest and the name.

    Returns the checkpoint on the first rank. Raises what went wrong on any of them.
    """
    from fulltilt.train import checkpoint_shards

    first, written = dist.get_rank(group) == 0, []
    name = [_hidden(root, snapshot.step).name]
    dist.broadcast_object_list(name, src=0, group=group)
    partial = root / name[0]
    model = {_MODEL + key: tensor for key, tensor in snapshot.model.items()}
    shards = {key: tensor for key, tensor in snapshot.tensors.items() if isinstance(tensor, DTensor)}
    rest = replace(snapshot, tensors={key: snapshot.tensors[key] for key in snapshot.tensors if key not in shards})

    def complete(sums: dict[str, FileSum]) -> None:
        written.append(_complete(partial, rest, sums))

    try:
        with refusals_told(partial, snapshot.size_bytes):
            begin = functools.partial(_begin, partial)
            checkpoint_shards.write(partial, {**model, **shards}, group, begin, complete)
    finally:
        if first:
            _discard(partial)
    return written[0] if first else None


def _hidden(root: Path, step: int) -> Path:
    """An unused name for a checkpoint that is not complete yet, or no longer; `prepare` removes what is left there."""
    return store.OwnedFolder(root.parent).temporary(root / folder_name(step))


def _begin(partial: Path, names: Sequence[str]) -> None:
    """Make the folder and announce its files. Raises OSError, ForeignFiles."""
    files = (*names, TENSORS_FILE, VALUES_FILE, MANIFEST_FILE)
    _owner(partial.parent).announce(partial, *(partial / name for name in files))
    partial.mkdir()


def _complete(partial: Path, snapshot: Snapshot, sums: dict[str, FileSum]) -> Checkpoint:
    """Write the files that ``sums`` does not have yet, and give the folder its name. Raises OSError."""
    contents = {
        TENSORS_FILE: checkpoint_format.tensor_parts(snapshot.tensors),
        VALUES_FILE: iter([json.dumps(snapshot.values).encode()]),
    }
    sums = {**sums, **{name: checkpoint_format.write_file(partial / name, parts) for name, parts in contents.items()}}
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "step": snapshot.step,
        "epoch": snapshot.epoch,
        "metric": snapshot.metric,
        "files": sums,
    }
    checkpoint_format.write_file(partial / MANIFEST_FILE, [_seal(manifest)])
    folder = _owner(partial.parent)
    folder.record(partial, *(partial / name for name in (*sums, MANIFEST_FILE)))
    checkpoint_format.sync(partial)
    return _appear(folder, partial, partial.with_name(folder_name(snapshot.step)), manifest)


def _owner(root: Path) -> store.OwnedFolder:
    folder = store.OwnedFolder.around(root)
    if folder is None:
        raise ForeignFiles(f"{root.parent} is not the output folder of a training", "Choose a new folder with --out.")
    return folder


def _appear(folder: store.OwnedFolder, partial: Path, final: Path, manifest: dict[str, Any]) -> Checkpoint:
    """Give the folder its name. `prepare` repairs every state in between."""
    displaced = final.with_name(f".displaced-{final.name}.{uuid.uuid4().hex[:12]}")
    try:
        if os.path.lexists(final):  # the run was rolled back and reached this step again
            folder.check(final)
            checkpoint_format.rename(folder, final, displaced)
        checkpoint_format.rename(folder, partial, final)
    finally:
        if displaced.exists():
            _settle(displaced, final)
    return _described(final, manifest)


def _settle(displaced: Path, final: Path) -> None:
    if final.exists():
        _delete(displaced)
    elif (folder := _owner(final)).owns(displaced):
        checkpoint_format.rename(folder, displaced, final)


def _delete(path: Path) -> None:
    """Renamed first: a half-deleted folder must not look like a damaged checkpoint."""
    hidden = _owner(path).temporary(path)
    checkpoint_format.rename(_owner(path), path, hidden)
    _discard(hidden)


def _discard(path: Path) -> None:
    """Remove our files in a hidden folder; files of others stay."""
    folder = _owner(path)
    with contextlib.suppress(OSError):  # a full disk refuses the note, not the removal
        if folder.owns(path):
            folder.remove(path)


def _seal(body: dict[str, Any]) -> bytes:
    """The manifest's bytes, with a checksum of its own."""
    checksum = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**body, "manifest_sha256": checksum}, indent=1) + "\n").encode()


def delete_old(root: Path, policy: KeepPolicy, saved: int) -> list[int]:
    """Delete what the policy does not keep of the steps up to ``saved``, which is complete; return those steps."""
    folder = _owner(root)
    # A later one was refused by the resume; it stays until its step is reached again, and keeps no place. One whose
    # manifest is damaged stays too: it may be all the user has.
    known = [one for one in described(root) if one.step <= saved]
    doomed = [step for step in steps_to_delete(known, policy) if folder.owns(root / folder_name(step))]
    with refusals_told(root):
        for step in doomed:
            _delete(root / folder_name(step))
    return doomed


def set_aside(root: Path) -> Path | None:
    """Give old checkpoints and their metrics other names, so that a fresh run is not taken for theirs.

    Returns the checkpoints' new place; None when there are none.
    """
    if not folders(root):
        return None
    log = root.with_name(METRICS_FILE)
    for number in itertools.count(1):
        old_root, old_log = root.with_name(f"{root.name}.old-{number}"), log.with_stem(f"{log.stem}.old-{number}")
        if not (os.path.lexists(old_root) or os.path.lexists(old_log)):
            break
    folder = _owner(root)
    with refusals_told(root):
        checkpoint_format.rename(folder, root, old_root)
        folder.make(root)
        # Its epochs are not part of the fresh run's history.
        if folder.owns(log):
            checkpoint_format.rename(folder, log, old_log)
    return old_root


# --------------------------------------------------------------------------- reading


def folders(root: Path) -> list[Path]:
    """The checkpoint folders under ``root``, newest first, complete by name but not yet verified."""
    found = [(int(match[1]), path) for path in root.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def described(root: Path) -> list[Checkpoint]:
    """The checkpoints under ``root`` by their manifests alone, newest first; those with a damaged one are left out."""
    known = []
    for path in folders(root):
        with contextlib.suppress(MachineError):
            known.append(_described(path, _manifest(path)))
    return known


def verify(folder: Path, info: RankInfo = _ALONE) -> Checkpoint:
    """Check every byte of a checkpoint against its manifest; the files are divided among the ranks.

    Raises DamagedCheckpoint naming the file.
    """
    manifest = _manifest(folder)
    for name, expected in list(manifest["files"].items())[info.rank :: info.world_size]:
        try:
            found = checkpoint_format.hash_file(folder / name)
        except OSError as error:
            raise DamagedCheckpoint(f"{folder / name}: {error.strerror or error}") from error
        if found != expected:
            sizes = f"{found['bytes']:,} bytes, {expected['bytes']:,} in the manifest"
            raise DamagedCheckpoint(f"{folder / name}: its checksum differs ({sizes})")
    return _described(folder, manifest)


def load(
    folder: Path, model: Mapping[str, torch.Tensor] | None = None, info: RankInfo = _ALONE
) -> tuple[dict[str, torch.Tensor], Any]:
    """The model's tensors and the tree of the rest, after verifying every byte. Raises DamagedCheckpoint.

    Where ``model``, the state of the present one, is sharded, only this rank's part of a sharded checkpoint is read.
    """
    files = _manifest(folder)["files"]
    sharded = SHARDS_FILE in files
    verify(folder, info if sharded else _ALONE)
    try:
        tensors = checkpoint_format.read_tensors(folder / TENSORS_FILE)
        if sharded:
            from fulltilt.train import checkpoint_shards

            tensors |= checkpoint_shards.read(folder, files, model or {}, _MODEL)
            weights = {key.removeprefix(_MODEL): tensors.pop(key) for key in list(tensors) if key.startswith(_MODEL)}
        else:
            weights = checkpoint_format.read_tensors(folder / MODEL_FILE)
        values = json.loads((folder / VALUES_FILE).read_bytes())
        return weights, checkpoint_format.unflatten_state(values, tensors)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{folder}: cannot be read back ({error})") from error


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST_FILE
    try:
        with store.open_plain(path) as file:
            raw = file.read()
        manifest: dict[str, Any] = json.loads(raw)
        del manifest["manifest_sha256"]
        if _seal(manifest) != raw:
            raise DamagedCheckpoint(f"{path}: its own checksum differs")
        if manifest["schema_version"] > SCHEMA_VERSION:
            raise MachineError(f"{folder} was written by a newer Fulltilt", "Update: pip install --upgrade fulltilt")
        step, files = manifest["step"], manifest["files"]
        numbers = [step, manifest["epoch"], manifest["metric"] or 0.0, *(files[name]["bytes"] for name in files)]
        complete = {TENSORS_FILE, VALUES_FILE} <= files.keys() and {MODEL_FILE, SHARDS_FILE} & files.keys()
        plain = all(isinstance(number, int | float) for number in numbers)
        if not (complete and plain and all(Path(name).name == name for name in files)):
            raise TypeError
        if _NAME.fullmatch(folder.name) and folder.name != folder_name(step):
            raise DamagedCheckpoint(f"{path} is of step {step}, not of {folder.name}")
    except OSError as error:
        raise DamagedCheckpoint(f"{path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} is damaged ({type(error).__name__})") from error
    return manifest


def _described(folder: Path, manifest: dict[str, Any]) -> Checkpoint:
    return Checkpoint(folder, manifest["step"], manifest["epoch"], manifest["metric"])


# --------------------------------------------------------------------------- finding the newest


@dataclass(frozen=True, slots=True)
class NewestCheckpoint:
    """The newest intact checkpoint, or None when there is none at all; and why newer ones were refused."""

    checkpoint: Checkpoint | None
    warnings: tuple[str, ...] = ()


def newest_complete(root: Path) -> NewestCheckpoint:
    """Verify checkpoints, newest first, until one is intact. Raises MachineError when there are some and none is."""
    refused: list[tuple[Path, str]] = []
    for folder in folders(root) if root.is_dir() else ():
        try:
            found = verify(folder)
        except DamagedCheckpoint as damage:
            refused.append((folder, damage.what))
            continue
        return NewestCheckpoint(found, tuple(_fallback_warning(path, why, found) for path, why in refused))
    if refused:
        raise MachineError(
            f"none of the checkpoints in {root} ({len(refused)}) is intact; the newest: {refused[0][1]}",
            "Start again from nothing with --fresh, or give another one with --resume-from.",
        )
    return NewestCheckpoint(None)


def _fallback_warning(refused: Path, why: str, taken: Checkpoint) -> str:
    lost = int(refused.name.removeprefix("step-")) - taken.step
    told = "1 step is" if lost == 1 else f"{lost} steps are"
    return f"{refused.name} is refused: {why}. Falling back to {taken.folder.name}: {told} lost."


# --------------------------------------------------------------------------- writing in the background


class HostMemory:
    """Host copies of device tensors, in pinned buffers that every save uses again."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def freeze(
        self, tensors: Mapping[str, torch.Tensor], prefix: str, mesh: DeviceMesh | None = None
    ) -> dict[str, torch.Tensor]:
        """Copies that no later step can change. The caller synchronises once, after the last of them.

        Of sharded tensors each rank copies its part; ``mesh`` is the CPU mesh of the same ranks.
        """
        frozen: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            source = local_shard(tensor.detach())
            key = f"{prefix}:{name}"
            buffer = self._buffers.get(key)
            if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
                buffer = self._buffers[key] = _host_buffer(source)
            frozen[name] = buffer.copy_(source, non_blocking=source.is_cuda)
            if isinstance(tensor, DTensor):
                frozen[name] = DTensor.from_local(
                    buffer, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
                )
        return frozen


def _host_buffer(source: torch.Tensor) -> torch.Tensor:
    if source.is_cuda:
        try:
            return torch.empty_like(source, device="cpu", pin_memory=True)
        except RuntimeError:  # pinned memory is limited here; pageable memory is slower
            pass
    return torch.empty_like(source, device="cpu")


class Writer:
    """Writes one checkpoint at a time in the background and deletes old ones by policy.

    The next ``check``, ``wait`` or ``save`` raises its error. With a CPU ``mesh`` all of its ranks save at once, each
    its shards.
    """

    def __init__(self, root: Path, policy: KeepPolicy, mesh: DeviceMesh | None = None) -> None:
        self.root, self.policy, self.mesh = root, policy, mesh
        self.newest: Checkpoint | None = None
        self.longest_save_s = 0.0
        # After an exception in the main thread the interpreter still waits for the save.
        self._thread = ThreadPoolExecutor(1, "fulltilt-checkpoint")
        self._saving: Future[None] | None = None

    def check(self) -> None:
        """Raise the error of a save that has ended. Never waits."""
        if self._saving is not None and self._saving.done():
            self.wait()

    def wait(self) -> None:
        """Wait until everything is on disk. Raises the writer's error."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def finish(self) -> None:
        """Wait for a save under way, the last one. Raises nothing."""
        self._thread.shutdown()

    def save(self, snapshot: Snapshot, *, background: bool = True) -> None:
        """Write ``snapshot``; its tensors must be frozen. The caller has waited for the save before this one."""
        self.wait()
        if background:
            self._saving = self._thread.submit(self._write, snapshot)
        else:
            self._write(snapshot)  # on this thread, where a second Ctrl-C stops at once

    def _write(self, snapshot: Snapshot) -> None:
        begun = time.monotonic()
        try:
            group = None if self.mesh is None else self.mesh.get_group()
            self.newest = write(self.root, snapshot) if group is None else write_shards(self.root, snapshot, group)
            if self.newest is not None:  # else this is not the first rank
                delete_old(self.root, self.policy, self.newest.step)
        except Exception as error:
            if isinstance(error, FulltiltError) or lost_contact(error):
                raise
            raise MachineError(f"the checkpoint was not written: {type(error).__name__}: {error}") from error
        finally:
            self.longest_save_s = max(self.longest_save_s, time.monotonic() - begun)


def check_space(root: Path, size_bytes: int, policy: KeepPolicy) -> None:
    """Raise MachineError before step 0 unless all kept checkpoints and the one being written will fit.

    Earlier checkpoints of this run count as free space, because new ones replace them.
    """
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and size_bytes > limit:
        raise MachineError(
            f"a checkpoint in {root} needs {size_bytes:,} bytes; the file-size limit is {limit:,}",
            "Raise it with `ulimit -f unlimited`.",
        )
    present = sum(file.stat().st_size for folder in folders(root) for file in folder.iterdir())
    kept = policy.last + policy.best
    needed = size_bytes * (kept + 1)
    free = shutil.disk_usage(root).free
    if needed > free + present:
        raise MachineError(
            f"{root} has {free:,} bytes free; {kept} kept checkpoints and one being written need {needed:,}",
            "Free some space, keep fewer checkpoints (keep_last, keep_best), or choose another folder with --out.",
        )
