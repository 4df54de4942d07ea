"""The tap on DataLoader: every batch passes through it, so that waits are measured and batches are counted.

The tap's iterator stands between the loop and torch's iterator, its ``source``. ``LoaderTaps.live`` may give it another
source: live tuning does, and exchanges the pool of workers behind it between two batches.
"""

from fulltilt.recorder.loader_tap.iterator import TappedIterator
from fulltilt.recorder.loader_tap.sites import ENGINE, call_sites, given_arguments
from fulltilt.recorder.loader_tap.tap import LoaderTap
from fulltilt.recorder.loader_tap.taps import LoaderTaps

__all__ = ["ENGINE", "LoaderTap", "LoaderTaps", "TappedIterator", "call_sites", "given_arguments"]
