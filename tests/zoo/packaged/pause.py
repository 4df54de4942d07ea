"""What the packaged job does between steps."""

import time


def pause():
    """Wait a little."""
    time.sleep(0.01)  # <- here
