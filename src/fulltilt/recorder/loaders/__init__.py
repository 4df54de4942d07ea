"""Loaders, their iterators and their workers: every batch passes through here and every wait is measured."""

from fulltilt.recorder.loaders.iterator import LoaderTap, PassMeter, TappedIterator
from fulltilt.recorder.loaders.loader_taps import ENGINE, METER, LoaderTaps, call_sites, named_arguments

__all__ = ["ENGINE", "METER", "LoaderTap", "LoaderTaps", "PassMeter", "TappedIterator", "call_sites", "named_arguments"]
