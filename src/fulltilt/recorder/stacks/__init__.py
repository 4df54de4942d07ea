"""Samples of a thread's Python stack, and what they show."""
