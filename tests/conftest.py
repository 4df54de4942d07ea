"""What holds for every test."""

from __future__ import annotations

import os
import signal

try:
    from hypothesis import settings
except ImportError:  # a machine with a GPU may have pytest and no more
    settings = None

# A suite started in the background of a shell inherits an ignored SIGINT, and so would every program it tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A change is judged by examples that are the same in every run. `make test-search` draws new ones.
if settings is not None:
    settings.register_profile("fixed", derandomize=True, deadline=None)
    settings.register_profile("search", deadline=None)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
