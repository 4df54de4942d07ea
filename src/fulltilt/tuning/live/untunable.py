"""Which loaders `run --auto` leaves alone, and why, in the words of the verdict."""

from __future__ import annotations

import multiprocessing
import threading
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    MapDataPipe,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

# These fix their whole order when the first index is drawn, whatever happens afterwards.
FIXED_AT_ONCE = (SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
# Accelerate's wrappers pass on what the sampler inside gives.
WRAPPERS = {"BatchSamplerShard": "batch_sampler", "SkipBatchSampler": "batch_sampler"}
OVER_A_SEQUENCE: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))))


def reason_against(loader: Any) -> str | None:
    """Why this loader is left alone, from what it is made of; None when nothing speaks against tuning it."""
    kind = type(loader)
    if kind.__iter__ is not DataLoader.__iter__ or kind._get_iterator is not DataLoader._get_iterator:
        return f"its class {kind.__name__} iterates in a way of its own"
    if isinstance(loader.dataset, IterableDataset) and loader.num_workers:
        return (
            "an IterableDataset divides its data among its workers: another number would lose or repeat samples, "
            "unless the data set is written for it"
        )
    if isinstance(loader.dataset, MapDataPipe):
        return "a DataPipe keeps a state of its own in each worker"
    if loader.num_workers > 1 and not getattr(loader, "in_order", True):
        return "its batches come in no fixed order (in_order=False)"
    if torch.get_default_device().type != "cpu":
        return f"the default device is {torch.get_default_device()}, from which torch draws the seeds of workers"
    if loader.num_workers:
        return None
    # A loader without workers cannot always get some behind the script's back.
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if method != "fork":
        return (
            f"workers would start by {method}, which runs the script's top level again; the script has not asked for it"
        )
    if multiprocessing.current_process().daemon:
        return "this process may not start processes of its own (it is a daemon)"
    if threading.current_thread() is not threading.main_thread():
        return "a thread of the script's own draws its batches; forking beside the main thread could catch a lock"
    return None


def reason_of_sampler(sampler: Any, iterator: Any) -> str | None:
    """Why a sampler may not be read further ahead than the script itself does; ``iterator`` is its own, under way."""
    kind = type(sampler)
    if isinstance(iterator, OVER_A_SEQUENCE) or any(kind.__iter__ is known.__iter__ for known in FIXED_AT_ONCE):
        return None
    if isinstance(sampler, RandomSampler) and (kind.__iter__ is RandomSampler.__iter__ or _of_accelerate(kind)):
        # With a generator of the script's own, later permutations of one pass are drawn from it when they are needed.
        later = sampler.replacement or sampler.num_samples > len(sampler.data_source)
        if sampler.generator is not None and later:
            return "its RandomSampler draws from the script's own generator during the pass"
        return None
    if kind.__iter__ is BatchSampler.__iter__:
        inner = getattr(iterator, "gi_frame", None)
        return reason_of_sampler(sampler.sampler, inner and inner.f_locals.get("sampler_iter"))
    if _of_accelerate(kind) and kind.__name__ in WRAPPERS:
        return reason_of_sampler(getattr(sampler, WRAPPERS[kind.__name__]), None)
    if isinstance(sampler, list | tuple | range):
        return None
    return (
        f"its sampler {kind.__name__} may depend on what training does between two batches, "
        "so it must not be read further ahead"
    )


def _of_accelerate(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "accelerate"
