"""Showing what was measured and found: terminal, page, JSON. Nothing is computed here."""
