"""A GPU test that hangs says where, and ends: the machine is lent by the minute, and may lack pytest-timeout."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Iterator

import pytest

LONGEST_S = 240


@pytest.fixture(autouse=True)
def _ends_in_time(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.config.pluginmanager.hasplugin("timeout"):
        yield
        return
    capturing = request.config.pluginmanager.getplugin("capturemanager")
    with capturing.global_and_fixture_disabled():
        said = os.dup(sys.stderr.fileno())
    faulthandler.dump_traceback_later(LONGEST_S, exit=True, file=said)
    yield
    faulthandler.cancel_dump_traceback_later()
    os.close(said)
