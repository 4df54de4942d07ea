"""Loaders, their iterators and their workers: every batch passes through here and every wait is measured."""

from fulltilt.recorder.loaders.iterator import LoaderTap, TappedIterator
from fulltilt.recorder.loaders.loader_hooks import ENGINE, LoaderTaps, call_sites, given_arguments

__all__ = ["ENGINE", "LoaderTap", "LoaderTaps", "TappedIterator", "call_sites", "given_arguments"]
