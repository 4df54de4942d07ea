"""Loaders, their iterators and their workers: every batch passes through here and every wait is measured."""

from fulltilt.recorder.loaders.call_sites import ENGINE, call_sites, named_arguments
from fulltilt.recorder.loaders.loader_stats import LoaderStats
from fulltilt.recorder.loaders.registry import TIMER, BatchTimer, LoaderRegistry

__all__ = ["ENGINE", "TIMER", "BatchTimer", "LoaderRegistry", "LoaderStats", "call_sites", "named_arguments"]
