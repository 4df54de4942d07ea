"""timm backbones: which can be used, their feature maps and weights, and their blocks from the deepest up."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from fulltilt.errors import UsageError
from fulltilt.recipes.pretrained import only_kept_files
from fulltilt.train.weight_import import compare, read_weights

# The decoder works from stride 4 down: finer maps cost most of the time and tell little.
FINEST_STRIDE = 4


def check_backbone(name: str, size: int, weights: str) -> None:
    """Raise UsageError when the backbone or a picture of ``size`` would fail. Costs no memory: nothing is computed."""
    with torch.device("meta"):
        features = feature_maps(name, size, "none").eval()
        usable_levels(features)
        try:
            features(torch.empty(1, 3, size, size))
        except (RuntimeError, AssertionError, ValueError) as error:
            raise UsageError(
                f"{name} takes no pictures of {size}×{size}: {_first_line(error)}", "Change --img-size or --backbone."
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
            # Transformers with positions for one size take others only when told so.
            made = timm.create_model(name, **asked, img_size=size)
        except TypeError:
            made = timm.create_model(name, **asked)
    except (RuntimeError, AttributeError, AssertionError, TypeError, ValueError) as error:
        raise UsageError(f"{name} gives no feature maps: {error}", "Take a backbone like edgenext_base.") from error
    except OSError as error:
        reason = str(error).splitlines()[0][:160]
        raise UsageError(
            f"the weights of {name} cannot be fetched: {reason}", "Give --weights FILE or none."
        ) from error
    return made


def _known(name: str) -> str:
    name = name.removeprefix("timm/")  # as the hub calls them
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise UsageError(f"timm has no backbone {name!r}{hint}", "timm.list_models() shows all of them.")
    return name


def _weights_for(name: str, path: Path) -> dict[str, torch.Tensor]:
    """The weights of a file, safely read. Raises UsageError when they are of another backbone."""
    with torch.device("meta"):
        whole = timm.create_model(name)
    given, _ = read_weights(path)
    fit = compare(whole.state_dict(), given, str(path))
    if not fit.taken:
        raise UsageError(f"{path} holds no weights of {name}", "Give timm's own weights of that backbone, or none.")
    return given


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


def usable_levels(features: Any) -> list[int]:
    """The numbers of the feature maps that the decoder works on, the finest first. Raises UsageError without one."""
    strides = features.feature_info.reduction()
    levels = [level for level, stride in enumerate(strides) if stride >= FINEST_STRIDE]
    if not levels:
        raise UsageError("this backbone gives no feature map of stride 4 or more", "Take one like edgenext_base.")
    return levels


def blocks(backbone: nn.Module, most: int = 5) -> list[tuple[str, ...]]:
    """Patterns of the backbone's parameter names in at most ``most`` groups, the deepest first."""
    root = backbone
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
