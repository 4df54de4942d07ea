"""CLIP with transformers: pretrained from a folder or the hub, or with random weights in two sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from fulltilt.errors import UsageError
from fulltilt.recipes.carclip import GIVE
from fulltilt.recipes.pretrained import load

# What every CLIP model was trained with.
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
# transformers' 0.02 is too small beside the patch embeddings, about 25 times as large: the model learns colours and,
# for long, no shapes. Synthetic cars, 10,000 samples: recall at 1 is 8 × chance with 0.02 and 25 × with this.
POSITION_STD = 0.3
# The tokenizer of a model with random weights. Captions of cars have a few hundred words.
TOKENIZER = {
    "size": 4096,
    "start": "<|startoftext|>",
    "end": "<|endoftext|>",
    "pad": "<|endoftext|>",
    "lowercase": True,
}


class DualEncoder(torch.nn.Module):
    """transformers' CLIPModel with one ``forward`` to normalised embeddings, for torch.compile and checkpointing."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, clip: Any, tokenizer: Any, about: str) -> None:
        super().__init__()
        self.clip, self.tokenizer, self.about = clip, tokenizer, about
        self.image_size = int(clip.config.vision_config.image_size)
        self.register_buffer("mean", torch.tensor(CLIP_MEAN)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(CLIP_STD)[:, None, None], persistent=False)

    @property
    def log_scale(self) -> torch.nn.Parameter:
        """The logarithm of 1 / temperature."""
        scale: torch.nn.Parameter = self.clip.logit_scale
        return scale

    def forward(self, images: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings [batch, width], float32, of images (uint8, or float in [0, 1]) and of their captions."""
        pixels = images.float() / 255 if images.dtype == torch.uint8 else images
        seen = self.clip.vision_model(pixel_values=(pixels - self.mean) / self.std)
        # Without a mask: attention is causal, and the end token gives the embedding.
        read = self.clip.text_model(input_ids=tokens.long())
        of_images = functional.normalize(self.clip.visual_projection(seen.pooler_output).float(), dim=-1)
        of_texts = functional.normalize(self.clip.text_projection(read.pooler_output).float(), dim=-1)
        return of_images, of_texts

    def gradient_checkpointing_enable(self) -> None:
        """For the engine's setting of that name."""
        self.clip.gradient_checkpointing_enable()

    def save(self, folder: Path) -> None:
        """Save in Hugging Face's format, as ``--model`` takes it."""
        from transformers import CLIPImageProcessor
        from transformers.utils import logging

        logging.disable_progress_bar()
        side = self.image_size
        preparing = CLIPImageProcessor(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
        for part in (self.clip, self.tokenizer, preparing):
            part.save_pretrained(folder)


# --------------------------------------------------------------------------- models


def load_hugging_face(name: str) -> DualEncoder:
    """The CLIP model of a folder or hub name. Raises UsageError, DataError."""
    from transformers import AutoConfig, AutoTokenizer, CLIPModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    kind = load("configuration", name, AutoConfig.from_pretrained, GIVE).model_type
    if kind != "clip":
        raise UsageError(f"the model in {name} is of type {kind!r}, not clip", "Give a CLIP model's folder.")
    clip = load("CLIP model", name, CLIPModel.from_pretrained, GIVE)
    tokenizer = load("tokenizer", name, AutoTokenizer.from_pretrained, GIVE)
    return DualEncoder(clip, tokenizer, f"{name}, pretrained")


def random_weights(size: str, tokenizer: Any, image_size: int | None, temperature: float) -> DualEncoder:
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
        raise UsageError(
            f"image_size {image_size} is not a multiple of {vision.get('patch_size', 32)}, the model's patch"
        )
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    config = CLIPConfig(
        text_config={**text, "vocab_size": len(tokenizer), "projection_dim": width, **ids},
        vision_config={**vision, "projection_dim": width},
        projection_dim=width,
        logit_scale_init_value=math.log(1 / temperature),
    )
    clip = CLIPModel(config)
    torch.nn.init.normal_(clip.vision_model.embeddings.position_embedding.weight, std=POSITION_STD)
    return DualEncoder(clip, tokenizer, f"{size}, random weights")


def fixed_length(tokenizer: Any, captions: Sequence[str], most: int) -> int:
    """The tokens of the longest caption, rounded up to 8 for the GPU, and at most ``most``."""
    longest = max((len(ids) for ids in tokenizer(list(captions))["input_ids"]), default=8)
    return min(-(-longest // 8) * 8, most)


def tokenised(tokenizer: Any, captions: Sequence[str], length: int) -> torch.Tensor:
    """int32 [captions, length]. A longer caption is truncated before its end token."""
    found = tokenizer(list(captions), padding="max_length", truncation=True, max_length=length)
    return torch.tensor(found["input_ids"], dtype=torch.int32)
