"""The network: a timm backbone, and a coarse-to-fine decoder with a mixture of experts at each level."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from fulltilt.errors import UsageError
from fulltilt.recipes.pretrained import only_kept_files
from fulltilt.train.config import did_you_mean
from fulltilt.train.weight_import import compare, read_weights, reason


class CodNet(nn.Module):
    """Segments camouflaged objects: logits of the mask at the size of the image."""

    def __init__(self, backbone: nn.Module, levels: list[int], width: int, num_experts: int) -> None:
        super().__init__()
        self.backbone = backbone
        channels = [backbone.feature_info.channels()[level] for level in levels]  # type: ignore[operator, union-attr]
        self.levels = levels
        self.channels_last = str(getattr(backbone, "output_fmt", "NCHW")).endswith("NHWC")  # Swin and its kin
        self.narrow = nn.ModuleList(nn.Conv2d(count, width, 1) for count in channels)
        # The finest map is as large as all others together; it only refines edges.
        self.experts = nn.ModuleList(Experts(width, num_experts, max(width // 2, 8)) for _ in channels[1:])
        self.smooth = nn.ModuleList(_smooth(width) for _ in channels)
        self.heads = nn.ModuleList(nn.Conv2d(width, 1, 1) for _ in channels)
        for head in self.heads:
            # Few pixels are hidden: begin with that prior.
            nn.init.constant_(head.bias, -2.0)  # type: ignore[arg-type]

    def forward(self, images: torch.Tensor, return_deep_supervision: bool = False) -> Any:
        """Logits [batch, 1, height, width]; with ``return_deep_supervision`` also the experts' imbalance and the logits
        of the coarser levels, the coarsest first.
        """
        maps = self.backbone(images)
        if self.channels_last:
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
        """As in nn.Module, but a BatchNorm with frozen weights keeps its statistics too."""
        super().train(mode)
        for module in self.backbone.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.weight is not None:
                module.train(mode and module.weight.requires_grad)
        return self


def _smooth(width: int) -> nn.Module:
    # GroupNorm: gradients stay the same when a batch is halved after out-of-memory.
    return nn.Sequential(
        nn.Conv2d(width, width, 3, padding=1, bias=False), nn.GroupNorm(8 if width % 8 == 0 else 1, width), nn.GELU()
    )


def build(backbone: str, size: int, *, weights: str = "none", width: int = 64, num_experts: int = 7) -> CodNet:
    """The network for images of ``size``. Raises UsageError for an unusable backbone or weights."""
    features = feature_maps(backbone, size, weights)
    return CodNet(features, usable_levels(features), width, num_experts)


class Experts(nn.Module):
    """``count`` small convolutional experts, added to their input with the weights of a router for each image.

    Routing is soft: every expert gets a gradient from every image. All experts are one grouped convolution.
    """

    def __init__(self, width: int, count: int, hidden: int) -> None:
        super().__init__()
        self.count = count
        self.router = nn.Linear(width, count)
        self.enter = nn.Conv2d(width, count * hidden, 1)
        self.look = nn.Conv2d(count * hidden, count * hidden, 3, padding=1, groups=count * hidden)
        self.leave = nn.Conv2d(count * hidden, width, 1)
        self.activation = nn.GELU()
        # The mixture begins as the identity.
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)  # type: ignore[arg-type]

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The features with the experts' output added, and the imbalance of the experts."""
        # In float32: in bf16 the shares would not add up to one.
        shares = torch.softmax(self.router(features.mean(dim=(2, 3))).float(), dim=1)
        hidden = self.activation(self.look(self.enter(features)))
        weight = shares.to(hidden.dtype).repeat_interleave(hidden.shape[1] // self.count, dim=1)
        mixed = self.leave(hidden * weight[:, :, None, None])
        return features + mixed, imbalance(shares)


def imbalance(shares: torch.Tensor) -> torch.Tensor:
    """Of routing shares [images, experts]: 0 when all experts get the same, experts - 1 when one gets all."""
    used = shares.mean(dim=0)
    return shares.shape[1] * (used * used).sum() - 1.0


# The decoder uses strides of 4 and more: finer maps cost most of the time and help little.
FINEST_STRIDE = 4


def check_backbone(name: str, size: int, weights: str) -> None:
    """Raise UsageError when the backbone or images of ``size`` would fail, tried on the meta device."""
    with torch.device("meta"):
        features = feature_maps(name, size, "none").eval()
        usable_levels(features)
        try:
            features(torch.empty(1, 3, size, size))
        except (RuntimeError, AssertionError, ValueError) as error:
            raise UsageError(
                f"{name} takes no pictures of {size}×{size}: {reason(error)}", "Change --img-size or --backbone."
            ) from error
    if weights not in ("none", "pretrained") and not Path(weights).exists():
        raise UsageError(f"--weights {weights} does not exist", "Give none, pretrained, or a file of weights.")
    home = timm.get_pretrained_cfg(_known(name)) if weights == "pretrained" else None
    if home is not None and home.hf_hub_id:
        only_kept_files(home.hf_hub_id.partition("@")[0], "Give --weights FILE or none.")


def feature_maps(name: str, size: int, weights: str) -> Any:
    """The backbone as timm's module of feature maps; ``weights`` is none, pretrained or a file. Raises UsageError."""
    name = _known(name)
    asked: dict[str, Any] = {"features_only": True, "pretrained": weights != "none"}
    if weights not in ("none", "pretrained"):
        asked["pretrained_cfg_overlay"] = {"state_dict": _weights_for(name, Path(weights))}
    try:
        try:
            # Transformers with position embeddings need the image size.
            made = timm.create_model(name, **asked, img_size=size)
        except TypeError:
            made = timm.create_model(name, **asked)
    except (RuntimeError, AttributeError, AssertionError, TypeError, ValueError) as error:
        raise UsageError(f"{name} gives no feature maps: {error}", "Take a backbone like edgenext_base.") from error
    except OSError as error:
        what = f"the weights of {name} cannot be fetched: {reason(error)}"
        raise UsageError(what, "Give --weights FILE or none.") from error
    return made


def _known(name: str) -> str:
    name = name.removeprefix("timm/")  # as the hub calls them
    if not timm.is_model(name):
        hint = did_you_mean(name, timm.list_models(), 3)
        raise UsageError(f"timm has no backbone {name!r}{hint}", "timm.list_models() shows all of them.")
    return name


def _weights_for(name: str, path: Path) -> dict[str, torch.Tensor]:
    """The weights in a file. Raises UsageError when they are of another backbone."""
    with torch.device("meta"):
        whole = timm.create_model(name)
    given = read_weights(path)
    fit = compare(whole.state_dict(), given, str(path))
    if not fit.taken:
        raise UsageError(f"{path} holds no weights of {name}", "Give timm's own weights of that backbone, or none.")
    return given


def usable_levels(features: Any) -> list[int]:
    """The indices of the feature maps for the decoder, the finest first. Raises UsageError without one."""
    strides = features.feature_info.reduction()
    levels = [level for level, stride in enumerate(strides) if stride >= FINEST_STRIDE]
    if not levels:
        raise UsageError("this backbone gives no feature map of stride 4 or more", "Take one like edgenext_base.")
    return levels


def blocks(backbone: nn.Module) -> list[tuple[str, ...]]:
    """Patterns of the backbone's parameter names in at most five groups, the deepest first."""
    root = backbone
    prefix = "backbone."
    while len(children := _children(root)) == 1:
        prefix += f"{children[0][0]}."
        root = children[0][1]
    units = [name for name, _ in children]
    if len(units) < 5:  # a transformer keeps all its blocks in one child
        units = [unit for name, child in children for unit in _inner(name, child)]
    # The shallow groups take the remainder: their units are small.
    parts = np.array_split(units, max(min(5, len(units)), 1))
    groups = [tuple(f"{prefix}{unit}.*" for unit in part) for part in parts]
    # The last group includes parameters of no unit, such as position embeddings.
    return [*reversed(groups[1:]), ("backbone.*",)]


def _inner(name: str, module: nn.Module) -> list[str]:
    if not isinstance(module, nn.Sequential | nn.ModuleList):
        return [name]
    return [f"{name}.{inner}" for inner, _ in _children(module)]


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, child) for name, child in module.named_children() if any(True for _ in child.parameters())]
