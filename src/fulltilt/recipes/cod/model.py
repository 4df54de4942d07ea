"""The network: a timm backbone, and a decoder that goes from coarse to fine with a mixture of experts at each level."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from fulltilt.errors import UsageError
from fulltilt.recipes.cod.experts import Experts

# The decoder works from stride 4 down: finer maps cost most of the time and tell little.
FINEST_STRIDE = 4


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
    features = _features(backbone, size, pretrained=weights == "pretrained")
    if weights not in ("none", "pretrained"):
        from fulltilt.train.foreign import load_weights

        load_weights(features, Path(weights))
    return CodNet(features, _levels(features), width, num_experts)


def check_backbone(name: str, size: int, weights: str) -> None:
    """Raise UsageError when ``build`` or a picture of ``size`` would fail. Costs no memory: nothing is computed."""
    with torch.device("meta"):
        features = _features(name, size, pretrained=False).eval()
        _levels(features)
        try:
            features(torch.empty(1, 3, size, size))
        except (RuntimeError, AssertionError, ValueError) as error:
            raise UsageError(
                f"{name} takes no pictures of {size}×{size}: {_first_line(error)}", "Change --img-size or --backbone."
            ) from error
    if weights not in ("none", "pretrained") and not Path(weights).exists():
        raise UsageError(f"--weights {weights} does not exist", "Give none, pretrained, or a file of weights.")


def _features(name: str, size: int, *, pretrained: bool) -> Any:
    if not timm.is_model(name.removeprefix("timm/")):
        close = difflib.get_close_matches(name, timm.list_models(), n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise UsageError(f"timm has no backbone {name!r}{hint}", "timm.list_models() shows all of them.")
    try:
        try:
            # Transformers with positions for one size take others only when told so.
            made = timm.create_model(name, pretrained=pretrained, features_only=True, img_size=size)
        except TypeError:
            made = timm.create_model(name, pretrained=pretrained, features_only=True)
    except (RuntimeError, AttributeError, AssertionError, TypeError, ValueError) as error:
        raise UsageError(f"{name} gives no feature maps: {error}", "Take a backbone like edgenext_base.") from error
    except OSError as error:
        reason = str(error).splitlines()[0][:160]
        raise UsageError(
            f"the weights of {name} cannot be fetched: {reason}", "Give --weights FILE or none."
        ) from error
    return made


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


def _levels(features: Any) -> list[int]:
    strides = features.feature_info.reduction()
    levels = [level for level, stride in enumerate(strides) if stride >= FINEST_STRIDE]
    if not levels:
        raise UsageError("this backbone gives no feature map of stride 4 or more", "Take one like edgenext_base.")
    return levels


def blocks(net: CodNet, most: int = 5) -> list[tuple[str, ...]]:
    """Patterns of the backbone's parameter names in at most ``most`` groups, the deepest first."""
    root: nn.Module = net.backbone
    prefix = "backbone."
    while len(children := _children(root)) == 1:
        prefix += f"{children[0][0]}."
        root = children[0][1]
    units = [name for name, _ in children]
    if len(units) < most:  # a transformer keeps all its blocks in one child
        units = [unit for name, child in children for unit in _inner(name, child)]
    groups = []
    for remaining in range(min(most, len(units)), 0, -1):
        # The shallow groups take what cannot be divided evenly: their units are small.
        size = len(units) // remaining
        groups.append(tuple(f"{prefix}{unit}.*" for unit in units[len(units) - size :]))
        units = units[: len(units) - size]
    # With the last go the parameters that belong to no unit, such as positions.
    return [*groups[:-1], ("backbone.*",)]


def _inner(name: str, module: nn.Module) -> list[str]:
    if not isinstance(module, nn.Sequential | nn.ModuleList):
        return [name]
    return [f"{name}.{inner}" for inner, _ in _children(module)]


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, child) for name, child in module.named_children() if any(True for _ in child.parameters())]
