"""A stopwatch for training scripts: counts steps and samples, times known parts, and prints what it saw.

The training part runs from the end of the first step to the end of the last: start-up and warm-up are no throughput.
"""

import json
import time


class Stopwatch:
    """``parts`` holds the seconds of known parts, by name. On a GPU, ``synchronize`` waits for the work queued."""

    def __init__(self, synchronize=None):
        self.steps = self.samples = self.samples_of_first = 0
        self.parts = {}
        self._synchronize = synchronize
        self._first_s = self._last_s = None

    def step(self, samples=0):
        """A step on so many samples has just ended."""
        self.steps += 1
        self.samples += samples
        if self._first_s is None:
            if self._synchronize:
                self._synchronize()
            self._first_s = time.perf_counter()
            self.samples_of_first = samples
            self.parts.clear()
        self._last_s = time.perf_counter()

    def arrived(self, name="data_wait"):
        """The next batch is there: the time since the last step ended was spent on it."""
        if self._last_s is not None:
            self.add(name, time.perf_counter() - self._last_s)

    def part(self, name):
        """A ``with`` block whose time belongs to a part."""
        return _Part(self, name)

    def add(self, name, seconds):
        """Add time to a part."""
        self.parts[name] = self.parts.get(name, 0.0) + seconds

    @property
    def seconds(self):
        """How long it has trained so far, the first step left out."""
        return 0.0 if self._first_s is None else time.perf_counter() - self._first_s

    def tell(self, **more):
        """Print the truth. On a GPU, call this right after the last step."""
        if self._synchronize:
            self._synchronize()
            self._last_s = time.perf_counter()
        truth = {
            "steps": self.steps,
            "samples": self.samples,
            "samples_after_first": self.samples - self.samples_of_first,
            "seconds": self._last_s - self._first_s,
            "parts": self.parts,
        }
        print("TRUTH", json.dumps({**truth, **more}), flush=True)


class _Part:
    def __init__(self, watch, name):
        self._watch, self._name = watch, name

    def __enter__(self):
        self._began_s = time.perf_counter()

    def __exit__(self, *_):
        self._watch.add(self._name, time.perf_counter() - self._began_s)
