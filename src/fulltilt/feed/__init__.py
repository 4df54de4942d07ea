"""The feed: ``feed.loader`` decodes a data set once and serves it from the fastest memory with room for it."""

from __future__ import annotations

from fulltilt.feed import augment
from fulltilt.feed.hdf5 import Hdf5Loader, hdf5
from fulltilt.feed.loader import FeedLoader, loader
from fulltilt.feed.staging import StagedFolder, stage_dir
from fulltilt.feed.text import TextLoader, Tokens, text, tokenise

__all__ = [
    "FeedLoader",
    "Hdf5Loader",
    "StagedFolder",
    "TextLoader",
    "Tokens",
    "augment",
    "hdf5",
    "loader",
    "stage_dir",
    "text",
    "tokenise",
]
