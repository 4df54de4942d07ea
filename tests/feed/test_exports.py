"""The public face of the feed, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

from fulltilt import feed


def test_the_names_that_users_write():
    assert sorted(feed.__all__) == [
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
    assert all(hasattr(feed, name) for name in feed.__all__)


def test_feed_is_loaded_when_it_is_first_used_and_needs_no_extra():
    code = """
import sys
import fulltilt
assert "torch" not in sys.modules
fulltilt.feed.loader
heavy = {"torchvision", "PIL", "h5py", "transformers", "timm"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
