"""Which checkpoint a run resumes from: the newest that passes its checksums, and what that loses."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import uuid
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from fulltilt import store
from fulltilt.errors import ForeignFiles, MachineError
from fulltilt.store.run_files import TRAINING
from fulltilt.train import checkpoint_files
from fulltilt.train.checkpoint_files import FileSum


@dataclass(frozen=True, slots=True)
class KeepPolicy:
    """Keep the ``last`` newest and the ``best`` ones by metric; ``mode`` says which end of the metric is good."""

    last: int = 2
    best: int = 1
    mode: Literal["max", "min"] = "max"

    @property
    def most(self) -> int:
        """The largest number of checkpoints that this policy keeps at once."""
        return self.last + self.best


# --------------------------------------------------------------------------- the format


SCHEMA_VERSION = 1
MODEL_FILE = "model.safetensors"
TENSORS_FILE = "state.safetensors"
VALUES_FILE = "state.json"
MANIFEST_FILE = "manifest.json"
METRICS_FILE = "metrics.csv"
# What a training writes into OUT besides the files of its record.
RESERVED = ("checkpoints", METRICS_FILE, "error.log", "profile", "tensorboard")
_NAME = re.compile(r"step-(\d{8,})")


class DamagedCheckpoint(MachineError):  # noqa: N818 - reads as the thing it is
    """A checkpoint folder fails its checksums. The message names the file."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a run at one step, frozen on the host and ready to be written."""

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
        return checkpoint_files.tensor_bytes(self.model) + checkpoint_files.tensor_bytes(self.tensors) + values


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on the disk, as its manifest describes it."""

    folder: Path
    step: int
    epoch: int
    metric: float | None
    size_bytes: int


def steps_to_delete(checkpoints: Collection[Checkpoint], policy: KeepPolicy) -> list[int]:
    """The steps whose checkpoints go, oldest first. The newest always stays; equal metrics favour the older one."""
    by_age = sorted(checkpoints, key=lambda c: c.step)
    rated = [(c.metric, c.step) for c in by_age if c.metric is not None and c.metric == c.metric]
    sign = -1.0 if policy.mode == "max" else 1.0
    rated.sort(key=lambda pair: (sign * pair[0], pair[1]))
    kept = {c.step for c in by_age[-max(policy.last, 1) :]} | {step for _, step in rated[: policy.best]}
    return [c.step for c in by_age if c.step not in kept]


def folder_name(step: int) -> str:
    """The name of the folder of a step's checkpoint."""
    return f"step-{step:08d}"


# --------------------------------------------------------------------------- writing


def claim(out: Path) -> store.OwnedFolder:
    """Make the output folder of a training ours. Raises ForeignFiles with the list, UsageError, MachineError."""
    folder = store.OwnedFolder.claim(out, TRAINING)
    store.create_folder(out)  # refuses files of somebody else's run
    in_the_way = [name for name in RESERVED if os.path.lexists(out / name) and not folder.owns(name)]
    if in_the_way:
        raise ForeignFiles(
            f"{out} holds files that Fulltilt did not write: {', '.join(in_the_way)}",
            "Move them elsewhere, or choose another folder with --out.",
        )
    return folder


def prepare(root: Path) -> None:
    """Make ``root`` in the claimed folder and check that it can be written. Raises ForeignFiles, MachineError."""
    folder = _owner(root)
    try:
        folder.make(root)
        folder.remove(folder.make(folder.temporary(root / "probe")))
    except OSError as error:
        raise checkpoint_files.cannot_write(root, error) from error


def sweep(root: Path) -> None:
    """Remove unfinished and half-deleted folders; put a displaced checkpoint back if its successor never arrived."""
    for path in sorted(root.glob(".displaced-step-*")):
        _settle(path, root / path.name[len(".displaced-") :].partition(".")[0])
    for pattern in (".partial-*", ".deleted-*", ".*.tmp"):
        for path in root.glob(pattern):
            _discard(path)


def write(root: Path, snapshot: Snapshot) -> Checkpoint:
    """Write a checkpoint so that it is complete under its name or not there at all. Raises MachineError."""
    partial, needed = None, snapshot.size_bytes
    try:
        partial = partial_folder(root, snapshot.step, (MODEL_FILE, TENSORS_FILE, VALUES_FILE))
        manifest = _write_files(partial, snapshot, needed)
        return _appear(partial, root / folder_name(snapshot.step), manifest)
    except OSError as error:
        raise checkpoint_files.cannot_write(partial or root, error, needed) from error
    finally:
        if partial is not None:
            _discard(partial)


def partial_folder(root: Path, step: int, files: Iterable[str]) -> Path:
    """A new hidden folder for the files of a step, which ``adopt`` makes a checkpoint and `sweep` knows.

    ``files`` are the names that will be written into it: of a writer that is killed, those are removed.
    """
    folder = _owner(root)
    partial = root / f".partial-{folder_name(step)}-{uuid.uuid4().hex[:12]}"
    folder.announce(partial, *(partial / name for name in (*files, MANIFEST_FILE)))
    partial.mkdir()
    return partial


def adopt(root: Path, made: Path, step: int, epoch: int, metric: float | None) -> Checkpoint:
    """Make a folder of files that another trainer wrote a checkpoint: on the disk, with checksums, by one rename.

    Raises MachineError.
    """
    try:
        sums = {path.name: checkpoint_files.sync_file(path) for path in sorted(made.iterdir()) if path.is_file()}
        manifest = _write_manifest(made, step, epoch, metric, sums, None)
        return _appear(made, root / folder_name(step), manifest)
    except OSError as error:
        raise checkpoint_files.cannot_write(made, error) from error


def _owner(root: Path) -> store.OwnedFolder:
    folder = store.OwnedFolder.around(root)
    if folder is None:
        raise ForeignFiles(f"{root.parent} is no output folder of a training", "Choose a new folder with --out.")
    return folder


def _appear(partial: Path, final: Path, manifest: dict[str, Any]) -> Checkpoint:
    folder = _owner(final)
    folder.record(partial, *(partial / name for name in (*manifest["files"], MANIFEST_FILE)))
    checkpoint_files.sync_folder(partial)
    displaced = final.with_name(f".displaced-{final.name}.{uuid.uuid4().hex[:12]}")
    try:
        if os.path.lexists(final):  # the run went back and came here again; `sweep` knows the way out of each state
            folder.check(final)
            checkpoint_files.rename(folder, final, displaced)
        checkpoint_files.rename(folder, partial, final)
    finally:
        if displaced.exists():
            _settle(displaced, final)
    return _described(final, manifest)


def _settle(displaced: Path, final: Path) -> None:
    if final.exists():
        _discard(displaced)
    elif (folder := _owner(final)).owns(displaced):
        checkpoint_files.rename(folder, displaced, final)


def _discard(path: Path) -> None:
    """Remove what is ours of a hidden folder. What somebody else has put there stays, in the open."""
    folder = _owner(path)
    with contextlib.suppress(OSError):  # a full disk refuses the note, not the removal
        if folder.owns(path) and not folder.remove(path):
            step = re.search(r"step-\d+", path.name)
            kept = path.with_name(f"{step[0] if step else path.name.strip('.')}.not-removed")
            if not os.path.lexists(kept):
                folder.move(path, kept)


def _write_files(folder: Path, snapshot: Snapshot, needed: int) -> dict[str, Any]:
    contents = {
        MODEL_FILE: checkpoint_files.tensor_parts(snapshot.model),
        TENSORS_FILE: checkpoint_files.tensor_parts(snapshot.tensors),
        VALUES_FILE: iter([json.dumps(snapshot.values).encode()]),
    }
    sums = {name: checkpoint_files.write_file(folder / name, parts, needed) for name, parts in contents.items()}
    return _write_manifest(folder, snapshot.step, snapshot.epoch, snapshot.metric, sums, needed)


def _write_manifest(
    folder: Path, step: int, epoch: int, metric: float | None, sums: Mapping[str, FileSum], needed: int | None
) -> dict[str, Any]:
    body = {
        "schema_version": SCHEMA_VERSION,
        "step": step,
        "epoch": epoch,
        "metric": metric,
        "files": {name: {"bytes": total.bytes, "sha256": total.sha256} for name, total in sums.items()},
    }
    checkpoint_files.write_file(folder / MANIFEST_FILE, [_seal(body)], needed)
    return body


def _seal(body: dict[str, Any]) -> bytes:
    """The manifest's exact bytes: its own checksum guards step, metric and layout as well."""
    checksum = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**body, "manifest_sha256": checksum}, indent=1) + "\n").encode()


def delete_old(root: Path, policy: KeepPolicy) -> list[int]:
    """Delete what the policy does not keep, and return those steps. Called only after a newer one is complete."""
    folder = _owner(root)
    known = [found for found in map(_described_or_none, folders(root)) if found is not None]
    doomed = [step for step in steps_to_delete(known, policy) if folder.owns(root / folder_name(step))]
    for step in doomed:
        # Renamed first: a half-deleted folder must not look like a damaged checkpoint.
        hidden = root / f".deleted-{folder_name(step)}.{uuid.uuid4().hex[:12]}"
        checkpoint_files.rename(folder, root / folder_name(step), hidden)
        _discard(hidden)
    return doomed


# --------------------------------------------------------------------------- reading


def folders(root: Path) -> list[Path]:
    """The checkpoint folders under ``root``, newest first, complete by name but not yet verified."""
    found = [(int(match[1]), path) for path in root.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def verify(folder: Path) -> Checkpoint:
    """Check every byte of a checkpoint against its manifest. Raises DamagedCheckpoint naming the file."""
    manifest = _manifest(folder)
    for name, expected in manifest["files"].items():
        try:
            found = checkpoint_files.hash_file(folder / name)
        except OSError as error:
            raise DamagedCheckpoint(f"{folder / name}: {error.strerror or error}") from error
        if found.bytes != expected["bytes"]:
            raise DamagedCheckpoint(f"{folder / name} has {found.bytes:,} bytes instead of {expected['bytes']:,}")
        if found.sha256 != expected["sha256"]:
            raise DamagedCheckpoint(f"{folder / name}: its checksum differs from the manifest")
    return _described(folder, manifest)


def is_ours(path: Path) -> bool:
    """Whether ``path`` is a folder of one of our checkpoints, intact or not."""
    return (path / MANIFEST_FILE).exists()


def values(folder: Path) -> dict[str, Any]:
    """The plain values of the state of a checkpoint that was verified. Raises DamagedCheckpoint."""
    try:
        return dict(json.loads((folder / VALUES_FILE).read_bytes()))
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{folder / VALUES_FILE}: cannot be read ({error})") from error


def load(folder: Path) -> tuple[dict[str, torch.Tensor], Any]:
    """The model's tensors and the tree of the rest, after verifying every byte. Raises DamagedCheckpoint."""
    verify(folder)
    try:
        values = json.loads((folder / VALUES_FILE).read_bytes())
        state = checkpoint_files.unflatten_state(values, checkpoint_files.read_tensors(folder / TENSORS_FILE))
        return checkpoint_files.read_tensors(folder / MODEL_FILE), state
    except (OSError, ValueError, KeyError) as error:
        raise DamagedCheckpoint(f"{folder}: cannot be read back ({error})") from error


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST_FILE
    try:
        raw = path.read_bytes()
        manifest = json.loads(raw)
        checksum = manifest.pop("manifest_sha256")
        plain_names = all(Path(name).name == name for name in manifest["files"])
        intact = _seal(manifest) == raw and plain_names and bool(manifest["files"])
        newer = manifest["schema_version"] > SCHEMA_VERSION
        step_agrees = folder_name(manifest["step"]) == folder.name or not _NAME.fullmatch(folder.name)
    except OSError as error:
        raise DamagedCheckpoint(f"{path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} is damaged ({type(error).__name__})") from error
    if not intact or not checksum:
        raise DamagedCheckpoint(f"{path}: its own checksum differs")
    if not step_agrees:
        raise DamagedCheckpoint(f"{path} is of step {manifest['step']}, not of {folder.name}")
    if newer:
        raise MachineError(f"{folder} was written by a newer Fulltilt", "Update: pip install --upgrade fulltilt")
    return dict(manifest)


def _described(folder: Path, manifest: dict[str, Any]) -> Checkpoint:
    size = sum(entry["bytes"] for entry in manifest["files"].values())
    return Checkpoint(folder, manifest["step"], manifest["epoch"], manifest["metric"], size)


def _described_or_none(folder: Path) -> Checkpoint | None:
    try:
        return _described(folder, _manifest(folder))
    except MachineError:
        return None  # a damaged one stays where it is: it may be all the user has


# --------------------------------------------------------------------------- the newest


@dataclass(frozen=True, slots=True)
class Found:
    """The newest complete checkpoint, or None when there is none at all; and why newer ones were refused."""

    checkpoint: Checkpoint | None
    warnings: tuple[str, ...] = ()


def newest_complete(root: Path) -> Found:
    """Verify from the newest on until one passes. Raises MachineError when there are some and none passes."""
    refused: list[tuple[Path, str]] = []
    for folder in folders(root) if root.is_dir() else ():
        try:
            found = verify(folder)
        except DamagedCheckpoint as damage:
            refused.append((folder, damage.what))
            continue
        return Found(found, tuple(_fallback_warning(path, why, found) for path, why in refused))
    if refused:
        raise MachineError(
            f"none of the checkpoints in {root} ({len(refused)}) is intact; the newest: {refused[0][1]}",
            "Start again from nothing with --fresh, or give another one with --resume-from.",
        )
    return Found(None)


def _fallback_warning(refused: Path, why: str, taken: Checkpoint) -> str:
    lost = int(refused.name.removeprefix("step-")) - taken.step
    told = "1 step is" if lost == 1 else f"{lost} steps are"
    return f"{refused.name} is refused: {why}. Falling back to {taken.folder.name}: {told} lost."
