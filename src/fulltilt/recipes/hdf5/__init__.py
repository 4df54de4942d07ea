"""Binary classification of feature windows in HDF5 files: event or not."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Literal

from fulltilt.recipes.recipe import Recipe, imported
from fulltilt.train.config import TrainSettings, option

__all__ = ["RECIPE", "Config", "Hdf5Options"]


@dataclass(frozen=True, slots=True)
class Hdf5Options:
    """The options of this recipe. Keys are names of arrays in the files."""

    features: str = option("features", "Keys of the features, separated by commas; concatenated along the last axis.")
    labels: str = option("labels", "Key of the labels, 0 or 1.")
    window: int | None = option(None, "Window length in rows, to cut windows out of long recordings.", least=2)
    stride: int = option(1, "Rows from one window to the next.", least=1)
    val_share: float = option(0.1, "Share of each file to validate on, if there are no val files.", above=0, most=0.5)
    stage_dir: str | None = option(None, "RAM disk or fast disk to copy the files to, if that pays.")
    use_specaugment: bool = option(False, "SpecAugment: mask bands of time and features in training.")
    imbalance: Literal["pos_weight", "focal", "none"] = option("pos_weight", "How to weigh the rarer class.")
    focal_gamma: float = option(2.0, "Gamma of the focal loss.", least=0)
    width: int = option(64, "Channels of the network.", least=4)
    heads: int = option(4, "Attention heads; must divide the width.", least=1)
    dropout: float = option(0.1, "Dropout before the last layer.", least=0, most=0.9)
    profile_performance: bool = option(True, "Log DataLoader times with TRAINER_LOG_LEVEL=DEBUG.")
    profile_gpu_util: bool = option(True, "Show GPU, CPU and memory use.")

    def problems(self, _settings: TrainSettings) -> list[str]:
        """Fields that are valid alone, but not together."""
        found = [] if self.width % self.heads == 0 else [f"heads ({self.heads}) do not divide width ({self.width})"]
        if not all(key.strip() for key in self.features.split(",")):
            found.append(f"features: {self.features!r} names an empty key")
        return found


RECIPE = Recipe(
    name="hdf5",
    about="Classify windows of features in HDF5 files: event or not.",
    options=Hdf5Options,
    check=imported("fulltilt.recipes.hdf5.trainer:check"),
    run=imported("fulltilt.recipes.hdf5.trainer:run"),
    synthetic="hdf5",
    synthetic_size=40_000,
    settings={
        "epochs": 20,
        "batch_size": 8192,
        "eval_batch_size": 4096,
        "workers": 8,
        "prefetch": 16,
        "lr": 3e-3,
        "warmup_epochs": 1.0,
        "weight_decay": 0.05,
        "clip_norm": 1.0,
        "monitor": "auroc",
    },
)

# Names of Config's fields that differ from the settings of every recipe.
_SHARED = {"val_batch_size": "eval_batch_size", "num_workers": "workers", "prefetch_factor": "prefetch"}
# DataLoader arguments without effect: buffers are always pinned, and the data is read once.
_WITHOUT_WORK = ("pin_memory", "persistent_workers")


@dataclass(slots=True)
class Config:
    """``cfg = Config(); cfg.batch_size = 5632``. A name that does not exist is an AttributeError."""

    batch_size: int = 8192
    val_batch_size: int = 4096
    num_workers: int = 8
    prefetch_factor: int = 16
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
        values = {name: value for name, value in asdict(self).items() if name not in _WITHOUT_WORK}
        ours = {_SHARED.get(name, name): value for name, value in values.items()}
        return replace(RECIPE, settings={**RECIPE.settings, **ours})
