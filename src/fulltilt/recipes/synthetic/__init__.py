"""Synthetic data in the real formats: hard enough to show learning, the same for the same seed, on any machine.

Each kind is a module here with ``make(folder, size, seed)``, which writes the data set into an empty folder and yields
the number of samples after each piece that is done.
"""

from __future__ import annotations

from fulltilt.recipes.synthetic.folder import KINDS, make_folder

__all__ = ["KINDS", "make_folder"]
