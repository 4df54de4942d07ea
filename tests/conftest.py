"""What holds for every test."""

from __future__ import annotations

import os
import signal

import pytest

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a machine with a GPU may have pytest and no more
    settings = None

# A suite started in the background of a shell inherits an ignored SIGINT, and so would every program it tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A change is judged by examples that are the same in every run. `make test-search` draws new ones.
if settings is not None:
    settings.register_profile("fixed", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("search", deadline=None)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A case named by an object's address is another one in every process, and xdist then runs nothing in parallel."""
    unstable = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if unstable:
        raise pytest.UsageError(f"give this case a name of its own (ids=...): {unstable[0]}")
