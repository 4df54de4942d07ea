"""Checkpoints written beside the training: the state is frozen on the host first, then a thread writes it.

An error of the writer is raised by the next call of ``check``, ``wait`` or ``save``: a run cannot end well without its
checkpoint.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from fulltilt.errors import FulltiltError, MachineError
from fulltilt.train import checkpoint, checkpoint_files
from fulltilt.train.checkpoint import Checkpoint, KeepPolicy, Snapshot
from fulltilt.train.fsdp import gathered


class HostMemory:
    """Host copies of device tensors, in buffers that are pinned once and used again by every save."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def freeze(self, tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
        """Copies that no later step can change. The caller synchronises once, after the last of them."""
        frozen = {}
        for name, tensor in tensors.items():
            source = gathered(tensor.detach())
            key = f"{prefix}:{name}"
            buffer = self._buffers.get(key)
            if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
                buffer = self._buffers[key] = _host_buffer(source)
            frozen[name] = buffer.copy_(source, non_blocking=source.is_cuda)
        return frozen


def _host_buffer(source: torch.Tensor) -> torch.Tensor:
    if source.is_cuda:
        try:
            return torch.empty_like(source, device="cpu", pin_memory=True)
        except RuntimeError:  # the machine limits pinned memory; an ordinary copy is slower but right
            pass
    return torch.empty_like(source, device="cpu")


class Writer:
    """Writes one checkpoint at a time in the background and deletes old ones by policy."""

    def __init__(self, root: Path, policy: KeepPolicy, on_saved: Callable[[Checkpoint], None] | None = None) -> None:
        self.root = root
        self.policy = policy
        self.newest: Checkpoint | None = None
        self.longest_save_s = 0.0
        self._on_saved = on_saved
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def check(self) -> None:
        """Raise what the writer met since the last call, if anything. Never waits."""
        if self._error is not None:
            error, self._error = self._error, None
            if isinstance(error, FulltiltError | KeyboardInterrupt):
                raise error
            raise MachineError(f"the checkpoint was not written: {type(error).__name__}: {error}") from error

    def wait(self) -> None:
        """Wait until the disk has everything. Raises what the writer met."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def finish(self) -> None:
        """Let a save under way come to its end, because something else has gone wrong. Raises nothing."""
        if self._thread is not None:
            self._thread.join()

    def save(self, snapshot: Snapshot, *, background: bool = True) -> None:
        """Write ``snapshot``; its tensors must be frozen. The caller has waited for the save before this one."""
        self.wait()
        if not background:
            self._write(snapshot)
            self.check()
            return
        # Not a daemon: if the main thread dies of an exception, the interpreter still waits for a save under way.
        self._thread = threading.Thread(target=self._write, args=(snapshot,), name="fulltilt-checkpoint")
        self._thread.start()

    def _write(self, snapshot: Snapshot) -> None:
        begun = time.monotonic()
        try:
            self.newest = checkpoint.write(self.root, snapshot)
            checkpoint.delete_old(self.root, self.policy)
            if self._on_saved is not None:
                self._on_saved(self.newest)
        except BaseException as error:  # handed over to the training thread, which raises it
            self._error = error
        self.longest_save_s = max(self.longest_save_s, time.monotonic() - begun)


def check_space(root: Path, size_bytes: int, policy: KeepPolicy) -> None:
    """Raise MachineError before step 0 unless all kept checkpoints and the one being written will fit.

    What earlier checkpoints of this run take already counts as room, because they make way for new ones.
    """
    _check_file_size_limit(root, size_bytes)
    present = sum(file.stat().st_size for folder in checkpoint.folders(root) for file in folder.iterdir())
    needed = size_bytes * (policy.most + 1)
    free = checkpoint_files.free_bytes(root)
    if needed > free + present:
        raise MachineError(
            f"{root} has {free:,} bytes free; {policy.most} kept checkpoints and one being written need {needed:,}",
            "Free some space, keep fewer checkpoints (keep_last, keep_best), or choose another folder with --out.",
        )


def _check_file_size_limit(root: Path, size_bytes: int) -> None:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and size_bytes > limit:
        raise MachineError(
            f"a checkpoint in {root} needs {size_bytes:,} bytes; the file-size limit is {limit:,}",
            "Raise it with `ulimit -f unlimited`.",
        )
