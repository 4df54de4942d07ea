"""Camouflaged object detection on COD10K-v3 in two stages: any timm backbone, a decoder with mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass

from fulltilt.recipes.recipe import Recipe, imported
from fulltilt.train.config import TrainSettings, option


@dataclass(frozen=True, slots=True)
class CodOptions:
    """What is trained, and how the run divides into its two stages."""

    img_size: int = option(384, "Images are resized to this side length.", least=32, most=2048)
    backbone: str = option("edgenext_base", "Any timm backbone with feature maps.")
    weights: str = option("none", "Backbone weights: none, pretrained (timm's hub), or a file.")
    num_experts: int = option(7, "Experts in each mixture of the decoder.", least=1, most=64)
    decoder_width: int = option(64, "Channels of the decoder.", least=8, most=1024)
    stage1_epochs: int | None = option(
        None, "Epochs with a frozen backbone, out of all [default: a quarter, at most 30]", least=0
    )
    skip_stage1: bool = option(False, "Start with stage 2; its number of epochs stays.")
    stage2_lr: float | None = option(2.4e-4, "Peak learning rate of stage 2.", above=0)
    stage2_batch_size: int | None = option(None, "Batch size of stage 2, over all GPUs.", least=1)
    progressive_unfreeze: bool = option(True, "Unfreeze the backbone block by block, deepest first.")
    deep_supervision: bool = option(True, "Add a loss on every level of the decoder.")
    balance: float = option(0.01, "Weight of the load-balancing loss of the experts.", least=0)
    include_noncam: bool = option(False, "Also use the images without camouflage (NonCAM).")

    def problems(self, settings: TrainSettings) -> list[str]:
        """Fields that are valid alone, but not together."""
        epochs = settings.epochs
        if self.stage1_epochs is not None and self.stage1_epochs >= epochs:
            return [f"stage1_epochs ({self.stage1_epochs}) leaves stage 2 no epoch: there are {epochs} in all (epochs)"]
        return []


def first_stage(options: CodOptions, epochs: int) -> int:
    """Epochs of stage 1: as set, else a quarter of all and at most 30."""
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
