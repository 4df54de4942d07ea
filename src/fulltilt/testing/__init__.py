"""Fakes for tests of Fulltilt and of what is built on it."""

from fulltilt.testing.clock import FakeClock

__all__ = ["FakeClock"]
