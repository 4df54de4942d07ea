"""CLIP through open_clip, where it is installed: ``open_clip:ViT-B-32`` or ``open_clip:ViT-B-32/laion2b_s34b_b79k``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fulltilt.errors import UsageError
from fulltilt.recipes.carclip.options import OPEN_CLIP
from fulltilt.recipes.carclip.towers import CLIP_MEAN, CLIP_STD, DualEncoder, Loaded, Towers
from fulltilt.recipes.pretrained import cannot_load


class OpenClipTowers(Towers):
    """A model of open_clip."""

    image_part = ("*clip.visual.*",)
    text_part = tuple(
        f"*clip.{name}*" for name in ("text.", "transformer.", "token_emb", "positional_emb", "ln_final", "text_pro")
    )

    def __init__(self, clip: Any) -> None:
        super().__init__()
        self.clip = clip

    @property
    def log_scale(self) -> torch.nn.Parameter:
        """See Towers."""
        scale: torch.nn.Parameter = self.clip.logit_scale
        return scale

    def image_features(self, images: torch.Tensor) -> torch.Tensor:
        """See Towers."""
        features: torch.Tensor = self.clip.encode_image(images)
        return features

    def text_features(self, tokens: torch.Tensor) -> torch.Tensor:
        """See Towers."""
        features: torch.Tensor = self.clip.encode_text(tokens)
        return features

    def gradient_checkpointing_enable(self) -> None:
        """See Towers."""
        self.clip.set_grad_checkpointing()

    def save(self, folder: Path) -> None:
        """See Towers. The weights under open_clip's own names."""
        from safetensors.torch import save_model

        folder.mkdir(parents=True, exist_ok=True)
        save_model(self.clip, str(folder / "open_clip_model.safetensors"))


def load(asked: str) -> Loaded:
    """The model that ``asked`` names. Raises UsageError when open_clip or the model is not there."""
    try:
        import open_clip
    except ImportError as error:
        raise UsageError(f"{asked} needs open_clip", "Install it with: pip install open_clip_torch") from error
    name, _, weights = asked.removeprefix(OPEN_CLIP).partition("/")
    try:
        clip = open_clip.create_model(name, pretrained=weights or None)
        tokenizer = open_clip.get_tokenizer(name)
    except Exception as error:  # its own RuntimeError for names, the hub's and the network's for weights
        which = f"{name}{f' with weights {weights}' if weights else ''}"
        remedy = "See open_clip.list_pretrained() for names and weights."
        raise cannot_load("open_clip model", which, error, remedy) from error
    side = clip.visual.image_size
    mean, std = (
        getattr(clip.visual, key, None) or usual for key, usual in (("image_mean", CLIP_MEAN), ("image_std", CLIP_STD))
    )
    return Loaded(
        model=DualEncoder(OpenClipTowers(clip), tuple(mean), tuple(std)),
        tokenise=lambda captions: tokenizer(captions).to(torch.int32),
        image_size=int(side[0] if isinstance(side, tuple) else side),
        about=f"{name} of open_clip, {f'weights {weights}' if weights else 'random weights'}",
        pretrained=bool(weights),
    )
