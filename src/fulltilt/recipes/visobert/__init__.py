"""Short social text in classes, with a transformer of Hugging Face's and its Trainer's config files as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fulltilt.recipes.recipe import Recipe, imported
from fulltilt.recipes.visobert.huggingface_config import translate
from fulltilt.train.config import option

__all__ = ["RECIPE", "VisobertOptions"]


@dataclass(frozen=True, slots=True)
class VisobertOptions:
    """What only this recipe has. Names that Hugging Face has too mean the same here."""

    model: str | None = option(None, "A model's folder or hub name; without one a small XLM-R is made.")
    text_column: str = option("text", "Column with the text.")
    label_column: str = option("label", "Column with the label.")
    classes: str | None = option(None, "The labels, separated by commas; otherwise those of the training data.")
    val_share: float = option(0.1, "Share held out where there is no validation file.", above=0, most=0.5)
    max_length: int = option(128, "Tokens of a text at most.", least=4)
    class_weights: Literal["balanced", "none"] = option("balanced", "Weigh rare classes up.")
    label_smoothing_factor: float = option(0.0, "Share of each label given to all classes.", least=0, most=0.9)
    warmup_ratio: float = option(0.0, "Share of all steps in which the learning rate rises.", least=0, most=1)
    load_best_model_at_end: bool = option(False, "Keep the best weights at the end, not the last.")
    tokens_per_batch: int | None = option(None, "Budget of tokens a batch, in place of the batch size.", least=16)
    optim: str | None = option(None, "Hugging Face's name of --optimizer, such as adamw_bnb_8bit.")
    lr_scheduler_type: str | None = option(None, "Hugging Face's name of --schedule.")
    dataloader_persistent_workers: bool | None = option(None, "Accepted; the data is resident.")
    dataloader_pin_memory: bool | None = option(None, "Accepted; the data is resident.")
    vocab_size: int = option(4000, "Pieces of the made model's tokenizer.", least=100)
    hidden_size: int = option(128, "Width of the made model; a multiple of 32.", least=32)
    num_hidden_layers: int = option(2, "Layers of the made model.", least=1)

    def problems(self) -> list[str]:
        """What is wrong between fields that are each right alone; some of them are the engine's."""
        found = []
        if self.hidden_size % 32:
            found.append(f"hidden_size ({self.hidden_size}) is not a multiple of 32, the width of a head")
        if self.classes is not None:
            names = [name.strip() for name in self.classes.split(",")]
            if len(names) < 2 or len(set(names)) < len(names) or not all(names):
                found.append(f"classes: {self.classes!r} should name two or more, each once")
        if self.warmup_ratio and (getattr(self, "warmup_epochs", 0) or getattr(self, "warmup_steps", None)):
            found.append("warmup_ratio, warmup_epochs and warmup_steps exclude each other; give only one of them")
        return found


RECIPE = Recipe(
    name="visobert",
    about="Classify short social text with a transformer, configured with Hugging Face's keys.",
    options=VisobertOptions,
    check_options=imported("fulltilt.recipes.visobert.trainer:check_options"),
    check=imported("fulltilt.recipes.visobert.data:check"),
    run=imported("fulltilt.recipes.visobert.trainer:run"),
    synthetic="text",
    synthetic_size=6000,
    settings={
        "epochs": 6,
        "batch_size": 96,
        "eval_batch_size": 192,
        "workers": 2,
        "prefetch": 4,
        "lr": 1e-3,
        "weight_decay": 0.01,
        "clip_norm": 1.0,
        "cuda_graphs": True,
        "monitor": "macro_f1",
    },
    translate=translate,
)
