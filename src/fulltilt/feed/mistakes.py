"""What can be wrong with the arguments of ``feed.loader``, told in a sentence before any work is done."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

from fulltilt.errors import UsageError

# What a DataLoader can be told and the feed decides by itself, so that one can stand in for the other in a script.
DECIDED_HERE = frozenset(
    {
        *("pin_memory", "pin_memory_device", "persistent_workers", "prefetch_factor"),
        *("timeout", "multiprocessing_context", "in_order"),
    }
)


def refuse_unknown(names: set[str]) -> None:
    """Raise UsageError for arguments that a DataLoader knows and the feed has no use for."""
    if unknown := sorted(names - DECIDED_HERE):
        raise UsageError(
            f"feed.loader has no {', '.join(unknown)}", "Random numbers follow from seed=..., batches from sampler=..."
        )


def refuse_mistakes(
    *,
    seed: Any,
    num_workers: Any,
    collate_fn: Any,
    reserve_bytes: Any,
    cache_dir: Any,
    cache_limit_bytes: Any,
    on_bad_sample: Any,
    max_bad_share: Any,
    checks: Any,
    decode: Any,
    cache_key: Any,
) -> None:
    """Raise UsageError for the first argument that is not what it has to be."""
    if on_bad_sample not in ("stop", "skip"):
        raise UsageError(f"on_bad_sample is {on_bad_sample!r}", "Choose 'stop' or 'skip'.")
    if not isinstance(max_bad_share, int | float) or not 0.0 <= max_bad_share <= 1.0:
        raise UsageError(f"max_bad_share is {max_bad_share!r}; it is a share of the samples, from 0 to 1")
    if num_workers is not None and (type(num_workers) is not int or num_workers < 0):
        raise UsageError(f"num_workers is {num_workers!r}; it must be a whole number of at least 0")
    if num_workers and multiprocessing.current_process().daemon:
        raise UsageError(
            f"num_workers is {num_workers}, and this process is a daemon, which may start none", "Use num_workers=0."
        )
    if not isinstance(checks, int) or checks < 0:
        raise UsageError(f"checks is {checks!r}; it must be a number of samples")
    if not isinstance(seed, int):
        raise UsageError(f"seed is {seed!r}; it must be a whole number")
    for name, count in (("reserve_bytes", reserve_bytes), ("cache_limit_bytes", cache_limit_bytes)):
        if count is not None and (not isinstance(count, int | float) or count < 0):
            raise UsageError(f"{name} is {count!r}; it must be a number of bytes")
    if collate_fn is not None and not callable(collate_fn):
        raise UsageError(f"collate_fn is {collate_fn!r}; it must be a function of a list of samples")
    if decode is not None and not callable(decode):
        raise UsageError(f"decode is {decode!r}; it must be a function of what the data set returns")
    if cache_key is not None and (not isinstance(cache_key, str) or not cache_key):
        raise UsageError(f"cache_key is {cache_key!r}; it must be a text that names the data, such as 'train-v3'")
    if cache_dir is not None and not isinstance(cache_dir, str | os.PathLike):
        raise UsageError(f"cache_dir is {cache_dir!r}; it must be a folder")
