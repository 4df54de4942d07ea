"""CLIP through transformers: pretrained from a folder or the hub, or with random weights in the sizes given here."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fulltilt.errors import UsageError
from fulltilt.recipes.carclip import tokens
from fulltilt.recipes.carclip.options import GIVE
from fulltilt.recipes.carclip.towers import CLIP_MEAN, CLIP_STD, DualEncoder, Loaded, Towers
from fulltilt.recipes.pretrained import load

# transformers' 0.02 drowns in the patches, which are about 25 times as large: such a model learns colours and, for a
# long time, no shapes. Made cars, 10,000 samples: recall at 1 is 8 × chance with 0.02 and 25 × with this.
POSITION_STD = 0.3


class HuggingFaceTowers(Towers):
    """transformers' CLIPModel, its tokenizer and what it wants of pictures."""

    image_part = ("*clip.vision_model.*",)
    text_part = ("*clip.text_model.*",)

    def __init__(self, clip: Any, tokenizer: Any) -> None:
        super().__init__()
        self.clip, self.tokenizer = clip, tokenizer

    @property
    def image_size(self) -> int:
        """Side of the pictures in pixels."""
        return int(self.clip.config.vision_config.image_size)

    @property
    def log_scale(self) -> torch.nn.Parameter:
        """See Towers."""
        scale: torch.nn.Parameter = self.clip.logit_scale
        return scale

    def image_features(self, images: torch.Tensor) -> torch.Tensor:
        """See Towers."""
        projected: torch.Tensor = self.clip.visual_projection(self.clip.vision_model(pixel_values=images).pooler_output)
        return projected

    def text_features(self, tokens: torch.Tensor) -> torch.Tensor:
        """See Towers. No mask: the text is read at its end token, and attention looks only back from there."""
        projected: torch.Tensor = self.clip.text_projection(self.clip.text_model(input_ids=tokens).pooler_output)
        return projected

    def gradient_checkpointing_enable(self) -> None:
        """See Towers."""
        self.clip.gradient_checkpointing_enable()

    def save(self, folder: Path) -> None:
        """See Towers. In Hugging Face's format: ``--model`` takes it too."""
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.clip.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(_preparing(self.image_size), indent=2) + "\n")


def pretrained(name: str, captions: Sequence[str]) -> Loaded:
    """The CLIP model of a folder or hub name. Raises UsageError, DataError."""
    from transformers import AutoTokenizer, CLIPModel
    from transformers.utils import logging

    _check_folder(name)
    logging.disable_progress_bar()
    clip = load("CLIP model", name, CLIPModel.from_pretrained, GIVE)
    tokenizer = load("tokenizer", name, AutoTokenizer.from_pretrained, GIVE)
    return _loaded(clip, tokenizer, captions, f"{name}, pretrained", pretrained=True)


def _check_folder(name: str) -> None:
    folder = Path(name)
    if not folder.is_dir():
        return
    try:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{folder} holds no model: its config.json cannot be read", "Give a CLIP model's folder."
        ) from error
    if kind != "clip":
        raise UsageError(f"the model in {folder} is of type {kind!r}, not clip", "Give a CLIP model's folder.")


def from_nothing(
    size: str, tokenizer: Any, captions: Sequence[str], image_size: int | None, temperature: float
) -> Loaded:
    """CLIP with random weights; ``size`` is small or vit-b-32."""
    from transformers import CLIPConfig, CLIPModel

    # Small enough for two CPU cores; the other is OpenAI's ViT-B/32, whose shapes are transformers' defaults.
    if size == "small":
        shape = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4}
        vision = {**shape, "num_hidden_layers": 4, "patch_size": 16, "image_size": image_size or 96}
        text, width = {**shape, "num_hidden_layers": 2}, 128
    else:
        vision, text, width = {"image_size": image_size or 224}, {}, 512
    if vision["image_size"] % vision.get("patch_size", 32):
        raise UsageError(f"image_size {image_size} is no multiple of {vision.get('patch_size', 32)}, the model's patch")
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    config = CLIPConfig(
        text_config={**text, "vocab_size": len(tokenizer), "projection_dim": width, **ids},
        vision_config={**vision, "projection_dim": width},
        projection_dim=width,
        logit_scale_init_value=math.log(1 / temperature),
    )
    clip = CLIPModel(config)
    torch.nn.init.normal_(clip.vision_model.embeddings.position_embedding.weight, std=POSITION_STD)
    return _loaded(clip, tokenizer, captions, f"{size}, random weights", pretrained=False)


def _loaded(clip: Any, tokenizer: Any, captions: Sequence[str], about: str, *, pretrained: bool) -> Loaded:
    length = tokens.fixed_length(tokenizer, captions, clip.config.text_config.max_position_embeddings)
    towers = HuggingFaceTowers(clip, tokenizer)
    return Loaded(
        model=DualEncoder(towers),
        tokenise=partial(tokens.tokenised, tokenizer, length=length),
        image_size=towers.image_size,
        about=about,
        pretrained=pretrained,
    )


def _preparing(side: int) -> dict[str, Any]:
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": side},
        "do_center_crop": True,
        "crop_size": {"height": side, "width": side},
        "resample": 3,
        "do_convert_rgb": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(CLIP_MEAN),
        "image_std": list(CLIP_STD),
    }
