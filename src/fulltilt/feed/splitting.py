"""Cutting a transform list at its first random transform, so that what comes before is done once.

The list (torchvision's Compose v1 and v2, nn.Sequential, albumentations-style callables with keyword arguments) is
found in the data set, wherever it hangs. Its first part is kept, its tail runs on every draw, on the CPU and per
sample exactly as the user wrote it. The cut is used only if the data set hands on what the list returns, untouched:
then tail(first part) under a seed is bit-equal to the data set's own sample under that seed, which is checked.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from fulltilt.feed import entropy
from fulltilt.feed.draws import sample_seed
from fulltilt.feed.generators import Generators
from fulltilt.feed.leaves import Unstorable
from fulltilt.feed.randomness import counting_reason, first_reason
from fulltilt.feed.readers import Failure, failure_of, pack_one, read_one
from fulltilt.feed.repeats import sample_of
from fulltilt.feed.stores import HostStore
from fulltilt.feed.structure import Layout, find_identical, layout_of, leaves_of, same_sample


@dataclass
class _Call:
    """One call of the transform list as it happened: how it was called and what its first part returned."""

    named: bool
    outputs: Any

    def parts(self) -> dict[Any, Any]:
        """The outputs by name or position."""
        if self.named:
            return dict(self.outputs)
        return dict(enumerate(self.outputs if isinstance(self.outputs, tuple) else (self.outputs,)))


@dataclass
class Split:
    """A transform list of a data set, cut before transform number ``cut``.

    ``named`` and ``places`` say how the tail is called, and at which leaf of a kept sample each of its inputs stands.
    """

    transforms: Any
    cut: int
    number: int = 0  # of the list among those of the data set
    named: bool = False
    places: dict[Any, int] = field(default_factory=dict)

    def find_in(self, dataset: Any) -> None:
        """Take the list from ``dataset``: what was found in another process is a copy of it."""
        self.transforms = next(itertools.islice(_lists_in(dataset), self.number, None))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "transforms": None}

    def names(self) -> tuple[list[str], list[str]]:
        """The names of the transforms done once, and of those done on every draw."""
        names = [type(transform).__name__ for transform in _items(self.transforms)]
        return names[: self.cut], names[self.cut :]

    @contextmanager
    def first_part_only(self) -> Iterator[list[_Call]]:
        """Within the block the list runs its first part alone and notes what it returned.

        The object's class is exchanged, not a reference to it: a data set may hold the list in several places.
        """
        original = type(self.transforms)
        first = _part(self.transforms, 0, self.cut)
        calls: list[_Call] = []

        def run(_: Any, *args: Any, **kwargs: Any) -> Any:
            outputs = first(*args, **kwargs) if self.cut else (kwargs or (args[0] if len(args) == 1 else args))
            calls.append(_Call(bool(kwargs), outputs))
            return outputs

        self.transforms.__class__ = type(original.__name__, (original,), {"__call__": run})
        try:
            yield calls
        finally:
            self.transforms.__class__ = original

    def draw(self, dataset: Any, index: int) -> tuple[Any, _Call]:
        """Sample ``index`` after the first part. Raises Unstorable if its outputs are not simply handed on."""
        with self.first_part_only() as calls:
            sample = dataset[index]
        if len(calls) != 1:
            raise Unstorable(f"the transform list is called {len(calls)} times for one sample")
        for value in calls[0].parts().values():
            if len(find_identical(sample, value)) != 1:
                raise Unstorable("the data set changes what its transform list returns")
        return sample, calls[0]

    def learn(self, sample: Any, call: _Call) -> None:
        """Note how the tail is called, and at which leaf each of its inputs stands."""
        self.named = call.named
        self.places = {key: find_identical(sample, value)[0] for key, value in call.parts().items()}

    def finish(self, leaves: list[Any]) -> list[Any]:
        """Run the tail on the leaves of a kept sample; returns the leaves of the finished one."""
        tail = _part(self.transforms, self.cut, None)
        inputs = {key: leaves[place] for key, place in self.places.items()}
        outputs = tail(**inputs) if self.named else tail(*inputs.values())
        results = outputs if self.named else dict(enumerate(outputs if isinstance(outputs, tuple) else (outputs,)))
        finished = list(leaves)
        for key, place in self.places.items():
            finished[place] = results[key]
        return finished


class SplitReader:
    """Serves finished samples; their first part comes from a store that all workers share and fill."""

    def __init__(self, dataset: Any, split: Split, kept: Layout, finished: Layout, store: HostStore, seed: int) -> None:
        self.dataset, self.split, self.kept, self.finished, self.store = dataset, split, kept, finished, store
        self.seed = seed
        self._generators: Generators | None = None
        self._in_worker = False

    def opened_in_worker(self) -> None:
        """Called once in a worker process before its first read."""
        self._in_worker = True

    def forget(self) -> None:
        """Do the first part of every sample anew."""
        self.store.present.zero_()

    def read(self, indices: torch.Tensor, rows: torch.Tensor, epoch: int) -> list[Failure]:
        """Write the finished sample of draw ``indices[i]`` into ``rows[i]``; returns what failed."""
        if self._generators is None:
            self._generators = Generators(self.dataset)
        failures = []
        with nullcontext() if self._in_worker else self._generators.untouched():
            for position, draw in enumerate(indices.tolist()):
                seed = sample_seed(self.seed, epoch, draw)
                failure = self._read_one(sample_of(draw), seed, rows[position], self._generators)
                if failure is not None:
                    failures.append(failure)
        return failures

    def _read_one(self, index: int, seed: int, row: torch.Tensor, generators: Generators) -> Failure | None:
        if not self.store.present[index]:
            failure = self._keep(index, generators)
            if failure is not None and failure.kind == "corrupt":
                return failure
            if failure is not None:
                # Its first part has a shape of its own, which the tail may well even out, or is random itself: drawn
                # whole, every time.
                generators.seed(seed)
                whole = read_one(self.dataset, index, self.finished, row)
                return failure if whole is None and failure.kind == "random" else whole
        leaves = leaves_of(self.kept.restore(self.store.rows[index]))
        generators.seed(seed)
        try:
            finished = self.split.finish(leaves)
        except Exception as error:
            return failure_of(self.dataset, index, error)
        return pack_one(self.dataset, index, self.finished.build(finished), self.finished, row)

    def _keep(self, index: int, generators: Generators) -> Failure | None:
        before = generators.mark()
        with self.split.first_part_only(), entropy.listened():
            failure = read_one(self.dataset, index, self.kept, self.store.rows[index])
        if failure is None and before != generators.mark():
            failure = Failure(index, "random", "it draws random numbers before its first random transform")
        if failure is None:
            self.store.present[index] = True  # after the row: another worker may read it at once
        return failure


def find_split(dataset: Any, indices: Iterable[int], generators: Generators) -> Split | None:
    """The cut that lets most be done once, checked on ``indices``; None where the data set cannot be split.

    A list that begins with a random transform is cut before it: what precedes the list, such as decoding, is done once.
    """
    indices = list(indices)
    for number, transforms in enumerate(_lists_in(dataset)):
        try:
            cut = min(_first_random(dataset, transforms, index) for index in indices)
            split = Split(transforms, cut, number)
            if _holds(dataset, split, indices, generators):
                return split
        except Exception:  # the user's own code, called in ways it may not foresee: then it is served as it is
            continue
    return None


def _holds(dataset: Any, split: Split, indices: list[int], generators: Generators) -> bool:
    """Whether first part and tail together give the data set's own samples, to the bit and under every seed tried."""

    def first_part(index: int) -> Any:
        return split.draw(dataset, index)[0]

    if first_reason(first_part, indices, generators) or counting_reason(first_part, indices[0], generators):
        return False
    kept = layout_of(split.draw(dataset, indices[0])[0])
    with generators.untouched():
        for seed, index in enumerate(indices):
            generators.seed(seed)
            whole = dataset[index]
            sample, call = split.draw(dataset, index)
            row = torch.zeros(kept.row_bytes, dtype=torch.uint8)
            kept.pack(sample, row)
            generators.seed(seed)
            split.learn(sample, call)
            leaves = split.finish(leaves_of(kept.restore(row)))
            if not same_sample(layout_of(whole).build(leaves), whole):
                return False
    return True


def _first_random(dataset: Any, transforms: Any, index: int) -> int:
    """The number of the first random transform on the way of sample ``index``."""
    sample, call = Split(transforms, 0).draw(dataset, index)
    del sample
    inputs = call.outputs
    items = _items(transforms)
    for number, transform in enumerate(items):
        step = _stepper(transform, call.named, inputs)
        own = Generators(dataset, transform)
        if first_reason(lambda _, step=step: step(), [index], own) is not None:  # type: ignore[misc]
            return number
        inputs = step()
    return len(items)


def _stepper(transform: Callable[..., Any], named: bool, inputs: Any) -> Callable[[], Any]:
    def step() -> Any:
        fresh = copy.deepcopy(inputs)  # a transform may work in place
        if named:
            return transform(**fresh)
        return transform(*fresh) if isinstance(fresh, tuple) else transform(fresh)

    return step


# --------------------------------------------------------------------------- transform lists


def _items(transforms: Any) -> list[Any]:
    return list(transforms if isinstance(transforms, torch.nn.Sequential) else transforms.transforms)


def _part(transforms: Any, start: int, stop: int | None) -> Any:
    """The same kind of list with a part of the transforms."""
    if isinstance(transforms, torch.nn.Sequential):
        return transforms[start:stop]
    part = copy.copy(transforms)
    if isinstance(part, torch.nn.Module):
        part._modules = dict(part._modules)  # a shallow copy of a module shares its dict of submodules
    part.transforms = transforms.transforms[start:stop]
    return part


def _is_list(item: Any) -> bool:
    if isinstance(item, torch.nn.Sequential):
        return len(item) > 0
    items = getattr(item, "transforms", None)
    if not callable(item) or isinstance(item, type) or not isinstance(items, list | tuple | torch.nn.ModuleList):
        return False
    return len(items) > 0 and all(callable(entry) for entry in items)


def _lists_in(dataset: Any) -> Iterator[Any]:
    """Transform lists among the attributes of a data set, of the data sets it wraps, and of objects in between."""
    seen: set[int] = set()
    level = [dataset]
    for _ in range(4):
        following: list[Any] = []
        for item in level:
            if id(item) in seen:
                continue
            seen.add(id(item))
            if _is_list(item):
                yield item
            else:
                following += [
                    v
                    for v in getattr(item, "__dict__", {}).values()
                    if hasattr(v, "__dict__") and not isinstance(v, type)
                ]
        level = following
