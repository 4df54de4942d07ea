"""What holds for every test."""

from __future__ import annotations

import signal

# A suite started in the background of a shell inherits an ignored SIGINT, and so would every program it tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
