"""Parts of bench/tune.py."""
