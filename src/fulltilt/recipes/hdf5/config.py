"""Guide 5's config object: its names and its defaults, and any of its old values by plain assignment."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fulltilt.recipes.recipe import Recipe

# The guide's names for what every recipe calls otherwise.
_SHARED = {"val_batch_size": "eval_batch_size", "num_workers": "workers", "prefetch_factor": "prefetch"}
# Of a stock DataLoader. The reader's buffers are always pinned, and what is read once needs no workers that stay.
_WITHOUT_WORK = ("pin_memory", "persistent_workers")


@dataclass(slots=True)
class Config:
    """``cfg = Config(); cfg.batch_size = 5632`` as in the guide. A name that does not exist is an AttributeError."""

    batch_size: int = 8192  # was 5632
    val_batch_size: int = 4096  # was 2048
    num_workers: int = 8  # was 4
    prefetch_factor: int = 16  # was 8
    pin_memory: bool = True
    persistent_workers: bool = True
    stage_dir: str | None = None
    use_specaugment: bool = False
    profile_performance: bool = True
    profile_gpu_util: bool = True
    data: str = "synthetic"
    out: str | None = None
    epochs: int = 20
    lr: float = 3e-3

    def recipe(self) -> Recipe:
        """The recipe with these values in place of its own defaults; flags win over them."""
        from fulltilt.recipes.hdf5 import RECIPE

        return replace(RECIPE, settings={**RECIPE.settings, **self.settings()})

    def settings(self) -> dict[str, Any]:
        """The same under the recipe's names."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {_SHARED.get(name, name): value for name, value in values.items() if name not in _WITHOUT_WORK}
