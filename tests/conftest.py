"""What holds for every test."""

from __future__ import annotations

import os
import signal
from importlib import import_module

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


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what needs a GPU where there is none.

    A case named by an object's address is another one in every process, and xdist then runs nothing in parallel.
    """
    unstable = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if unstable:
        raise pytest.UsageError(f"give this case a name of its own (ids=...): {unstable[0]}")
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not import_module("torch").cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))
