"""Camouflaged object detection on COD10K-v3 in two stages: any timm backbone, a decoder with mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass

from fulltilt.recipes.recipe import Recipe, imported
from fulltilt.train.config import option


@dataclass(frozen=True, slots=True)
class CodOptions:
    """What is trained, and how the run divides into its two stages."""

    img_size: int = option(384, "Side of the square that images are scaled to.", least=32, most=2048)
    backbone: str = option("edgenext_base", "Any timm backbone that gives feature maps.")
    weights: str = option("none", "Backbone weights: none, pretrained (timm's hub), or a file.")
    num_experts: int = option(7, "Experts of each mixture in the decoder.", least=1, most=64)
    decoder_width: int = option(64, "Channels of the decoder.", least=8, most=1024)
    stage1_epochs: int | None = option(
        None, "Epochs, of all, that train the decoder on a frozen backbone [default: a quarter, at most 30]", least=0
    )
    skip_stage1: bool = option(False, "Begin with stage 2; its epochs stay as many.")
    stage2_lr: float | None = option(2.4e-4, "The highest learning rate of stage 2.", above=0)
    stage2_batch_size: int | None = option(None, "Batch size of stage 2, over all GPUs.", least=1)
    progressive_unfreeze: bool = option(True, "Unfreeze the backbone block by block, the deepest first.")
    deep_supervision: bool = option(True, "Train every level of the decoder, not the last alone.")
    balance: float = option(0.01, "Weight of the term that keeps all experts in use.", least=0)
    include_noncam: bool = option(False, "Train and test on images without camouflage too.")

    def problems(self) -> list[str]:
        """What is wrong between fields that are each right alone; ``epochs`` is the engine's."""
        epochs = getattr(self, "epochs", None)
        if epochs is not None and self.stage1_epochs is not None and self.stage1_epochs >= epochs:
            return [f"stage1_epochs ({self.stage1_epochs}) leaves stage 2 no epoch: there are {epochs} in all (epochs)"]
        return []


def first_stage(options: CodOptions, epochs: int) -> int:
    """How many of the epochs stage 1 has. A quarter, and at most 30, unless it is set."""
    return min(epochs // 4, 30) if options.stage1_epochs is None else options.stage1_epochs


RECIPE = Recipe(
    name="cod",
    about="Camouflaged object detection on COD10K-v3 folders, in two stages.",
    options=CodOptions,
    check_options=imported("fulltilt.recipes.cod.trainer:check_options"),
    check=imported("fulltilt.recipes.cod.data:check"),
    run=imported("fulltilt.recipes.cod.trainer:run"),
    synthetic="cod",
    synthetic_size=1000,
    settings={
        "epochs": 120,
        "batch_size": 8,
        "lr": 4e-4,
        "min_lr": 1e-5,
        "weight_decay": 1e-4,
        "clip_norm": 1.0,
        "cuda_graphs": True,
        "monitor": "iou",
    },
)
