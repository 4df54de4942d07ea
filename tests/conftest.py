"""What holds for every test."""

from __future__ import annotations

import os
import signal

from hypothesis import settings

# A suite started in the background of a shell inherits an ignored SIGINT, and so would every program it tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# In CI a change is judged by examples that do not change from run to run; elsewhere new ones are drawn each time.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "search")
