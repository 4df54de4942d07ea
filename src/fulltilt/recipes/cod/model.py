"""The network: a timm backbone, and a decoder that goes from coarse to fine with a mixture of experts at each level."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from fulltilt.recipes.cod.backbone import feature_maps, usable_levels
from fulltilt.recipes.cod.experts import Experts


class CodNet(nn.Module):
    """Finds what is hidden: logits of the mask at the size of the picture."""

    def __init__(self, backbone: nn.Module, levels: list[int], width: int, num_experts: int) -> None:
        super().__init__()
        self.backbone = backbone
        channels = [backbone.feature_info.channels()[level] for level in levels]  # type: ignore[operator, union-attr]
        self.levels = levels
        self.channels_behind = str(getattr(backbone, "output_fmt", "NCHW")).endswith("NHWC")  # Swin and its kin
        self.narrow = nn.ModuleList(nn.Conv2d(count, width, 1) for count in channels)
        # The finest map is as large as all others together; it refines edges and needs no experts.
        self.experts = nn.ModuleList(Experts(width, num_experts, max(width // 2, 8)) for _ in channels[1:])
        self.smooth = nn.ModuleList(_smooth(width) for _ in channels)
        self.heads = nn.ModuleList(nn.Conv2d(width, 1, 1) for _ in channels)
        for head in self.heads:
            # A pixel is rarely hidden: beginning there spares the first epoch.
            nn.init.constant_(head.bias, -2.0)  # type: ignore[arg-type]

    def forward(self, images: torch.Tensor, return_deep_supervision: bool = False) -> Any:
        """Logits [batch, 1, height, width]; with ``return_deep_supervision`` also the experts' imbalance and the logits
        of the coarser levels, the coarsest first.
        """
        maps = self.backbone(images)
        if self.channels_behind:
            maps = [features.permute(0, 3, 1, 2) for features in maps]
        fused: torch.Tensor | None = None
        imbalances, logits = [], []
        for place in reversed(range(len(self.levels))):
            features = self.narrow[place](maps[self.levels[place]])
            if fused is not None:
                features = features + F.interpolate(
                    fused, size=features.shape[-2:], mode="bilinear", align_corners=False
                )
            if place > 0:
                features, uneven = self.experts[place - 1](features)
                imbalances.append(uneven)
            fused = self.smooth[place](features)
            if place == 0 or return_deep_supervision:
                logits.append(self.heads[place](fused))
        prediction = F.interpolate(logits[-1], size=images.shape[-2:], mode="bilinear", align_corners=False)
        if not return_deep_supervision:
            return prediction
        auxiliary = torch.stack(imbalances).mean() if imbalances else prediction.new_zeros(())
        return prediction, auxiliary, logits[:-1]

    def train(self, mode: bool = True) -> CodNet:
        """As every module, but a BatchNorm whose weights are frozen keeps its statistics too."""
        super().train(mode)
        for module in self.backbone.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.weight is not None:
                module.train(mode and module.weight.requires_grad)
        return self


def _smooth(width: int) -> nn.Module:
    # GroupNorm: a batch that is halved for want of memory gives the same gradients.
    return nn.Sequential(
        nn.Conv2d(width, width, 3, padding=1, bias=False), nn.GroupNorm(8 if width % 8 == 0 else 1, width), nn.GELU()
    )


def build(backbone: str, size: int, *, weights: str = "none", width: int = 64, num_experts: int = 7) -> CodNet:
    """The network for pictures of ``size``. Raises UsageError for a backbone or weights that will not do."""
    features = feature_maps(backbone, size, weights)
    return CodNet(features, usable_levels(features), width, num_experts)
