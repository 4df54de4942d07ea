"""The jobs of ``bench/feed.py``, one file for each kind of data."""
