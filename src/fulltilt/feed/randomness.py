"""Where randomness begins: whether a piece of a data set gives the same sample every time.

Independent witnesses, because a flip with probability 0.1 looks deterministic in most pairs of draws:
 1. the states of all generators in reach before and after (any draw moves one, whether or not the sample changes);
 2. the calls made meanwhile (a generator seeded by the operating system in mid-call, ``os.urandom``, ``secrets``);
 3. the samples themselves, drawn twice under different seeds;
and a fourth, because not all that changes is random: numbers that count the draws, and that the code goes by.

While a cache fills, the first witness is heard again for every single sample (``readers.py``), and so is what it asks
of the operating system (``entropy.py``): a sample that draws only now and then is caught when it does, before it is
served a second time.

Not detected: randomness that comes from none of Python's, numpy's or torch's generators (a C library's own, such as
cv2.setRNGSeed; the clock itself; another process), unless the two draws of a checked sample happen to differ. Nor, in
samples other than those checked here, a generator seeded in mid-call by the clock or by ``torch.Generator().seed()``.
Every doubt means random: such a data set is served as it is, which is slower and never wrong.
"""

from __future__ import annotations

import dis
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch

from fulltilt.feed import entropy
from fulltilt.feed.generators import Generators
from fulltilt.feed.own_code import own_module
from fulltilt.feed.structure import same_sample

_SEEDS = (0x5EED0001, 0x0DDBA11)
_ENTROPY_CALLS = frozenset({"getrandom", "uuid1"})  # what ``entropy`` does not hear
# The user's code asks for the time or the number of its process, and makes or seeds a generator. Either is harmless.
_CLOCKS = frozenset(
    {"getpid", "time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "now", "utcnow"}
)
_SEEDING = frozenset({"Random", "RandomState", "default_rng", "SeedSequence", "Generator", "seed", "manual_seed"})


def first_reason(draw: Callable[[int], Any], indices: Iterable[int], generators: Generators) -> str | None:
    """Why ``draw`` is random, as seen on ``indices``; None if nothing says so. Generators are left as they were."""
    with generators.untouched(), entropy.listened():
        for index in indices:
            reason = _reason(lambda index=index: draw(index), generators)  # type: ignore[misc]
            if reason is not None:
                return f"sample {index}: {reason}"
    return None


def _reason(call: Callable[[], Any], generators: Generators) -> str | None:
    generators.seed(_SEEDS[0])
    before = generators.mark()
    with _listen() as (heard, _):
        first = call()
    if before != generators.mark():
        return "it draws random numbers"
    if heard:
        return f"it draws random numbers ({heard[0]})"
    generators.seed(_SEEDS[1])
    before = generators.mark()
    second = call()
    if before != generators.mark():
        return "it draws random numbers"
    return None if same_sample(first, second) else "two draws of it differ"


def counting_reason(draw: Callable[[int], Any], index: int, generators: Generators) -> str | None:
    """Why sample ``index`` may depend on how often the data set was asked before; None if nothing says so.

    It is drawn twice: a number that only tells which sample was the last one is the same after both.
    """
    with generators.untouched():
        with _listen() as (_, ran):
            draw(index)
        before = generators.counts()
        draw(index)
        after = generators.counts()
    moved = [name for (owner, name), count in before.items() if after.get((owner, name), count) != count]
    used = [name for name in moved if _is_used(name, ran)]
    if not used:
        return None
    return "its code goes by a count of its own calls" + (f" ({used[0]})" if used[0] else "")


def _is_used(name: str, ran: Iterable[CodeType]) -> bool:
    """Whether a count is read for more than to count on: statistics that nothing goes by change no sample."""
    if not name:
        return True  # an itertools.count: each number that it gives is taken
    reads = 0
    for instruction in (instruction for code in ran for instruction in dis.get_instructions(code)):
        if instruction.argval == name:
            reads += instruction.opname.startswith("LOAD_") - instruction.opname.startswith("STORE_")
    return reads > 0


def goes_by(draw: Callable[[], Any], names: set[str], generators: Generators) -> str | None:
    """The one of ``names`` that the code of ``draw`` looks up and never sets itself; None if there is none."""
    with generators.untouched(), _listen() as (_, ran):
        draw()
    looked_up, kept_by_itself = set(), set()
    for instruction in (instruction for code in ran for instruction in dis.get_instructions(code)):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME"):
            looked_up.add(instruction.argval)
        elif instruction.opname in ("STORE_ATTR", "STORE_GLOBAL"):
            kept_by_itself.add(instruction.argval)
    return next(iter(sorted(names & looked_up - kept_by_itself)), None)


@contextmanager
def _listen() -> Iterator[tuple[list[str], set[CodeType]]]:
    """Calls into generators that no seed of ours governs, on this thread within the block; and the code that ran."""
    heard: list[str] = []
    ran: set[CodeType] = set()
    asked: list[str] = []
    makes_generators = False
    seeded: dict[int, Any] = {}  # generators made in this call from a seed of its own, kept alive so ids stay theirs
    random_file = random.seed.__func__.__code__.co_filename  # type: ignore[attr-defined]

    def listener(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal makes_generators
        if event == "call" and frame.f_code not in ran:
            ran.add(frame.f_code)
            makes_generators |= not _SEEDING.isdisjoint(frame.f_code.co_names) and _own(frame)
        if event == "call" and frame.f_code.co_filename == random_file:
            if frame.f_code.co_name == "seed" and isinstance(frame.f_locals.get("self"), random.Random):
                if frame.f_locals.get("a") is None:
                    heard.append("a generator seeded by the operating system")
                else:
                    seeded[id(frame.f_locals["self"])] = frame.f_locals["self"]
        elif event == "c_call":
            owner = getattr(argument, "__self__", None)
            if argument.__name__ in _ENTROPY_CALLS:
                heard.append(f"{argument.__name__}()")
            elif argument.__name__ == "seed" and isinstance(owner, torch.Generator):
                heard.append("a generator seeded by the operating system")
            elif argument.__name__ == "initial_seed" and owner is torch.default_generator:
                heard.append("by the seed of torch")
            elif argument.__name__ in _CLOCKS and _own(frame):
                asked.append(argument.__name__)
            elif isinstance(owner, random.Random) and id(owner) not in seeded and argument.__name__ != "seed":
                heard.append(f"random.Random.{argument.__name__}")

    previous: Any = sys.getprofile()
    sys.setprofile(listener)
    try:
        yield heard, ran
    finally:
        if previous is None or callable(previous):
            sys.setprofile(previous)
        else:
            sys.setprofile(None)
            previous.enable()  # cProfile's, which is no function
        if asked and makes_generators:
            heard.append(f"from a generator seeded by {asked[0]}()")


def _own(frame: FrameType) -> bool:
    """Whether the user's code runs in ``frame``: neither a library's nor this one."""
    name = str(frame.f_globals.get("__name__"))
    return name != __name__ and own_module(name)
