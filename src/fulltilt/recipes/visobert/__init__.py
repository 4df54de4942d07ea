"""Text classification with a Hugging Face transformer; takes config files of its Trainer as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fulltilt.recipes.recipe import Recipe, imported
from fulltilt.recipes.visobert.huggingface_config import translate
from fulltilt.train.config import TrainSettings, option

__all__ = ["RECIPE", "VisobertOptions"]


@dataclass(frozen=True, slots=True)
class VisobertOptions:
    """The options of this recipe. Names that Hugging Face also uses mean the same here."""

    model: str | None = option(None, "Folder or hub name of a model; without one, a small XLM-R with random weights.")
    text_column: str = option("text", "Column with the text.")
    label_column: str = option("label", "Column with the label.")
    classes: str | None = option(None, "Labels, separated by commas [default: those of the training data]")
    val_share: float = option(0.1, "Share to validate on, if there is no validation file.", above=0, most=0.5)
    max_length: int = option(128, "Maximum number of tokens per text.", least=4)
    class_weights: Literal["balanced", "none"] = option("balanced", "Class weights in the loss.")
    label_smoothing_factor: float = option(0.0, "Label smoothing.", least=0, most=0.9)
    warmup_ratio: float = option(0.0, "Learning-rate warm-up, as a share of all steps.", least=0, most=1)
    load_best_model_at_end: bool = option(False, "Save the best model at the end, not the last.")
    tokens_per_batch: int | None = option(None, "Batches by number of tokens, instead of batch size.", least=16)
    optim: str | None = option(None, "Hugging Face's name for --optimizer, such as adamw_bnb_8bit.")
    lr_scheduler_type: str | None = option(None, "Hugging Face's name for --schedule.")
    dataloader_persistent_workers: bool | None = option(None, "No effect: the data stays in memory.")
    dataloader_pin_memory: bool | None = option(None, "No effect: the data stays in memory.")
    vocab_size: int = option(4000, "Vocabulary size of the small XLM-R.", least=100)
    hidden_size: int = option(128, "Hidden size of the small XLM-R, a multiple of 32.", least=32)
    num_hidden_layers: int = option(2, "Layers of the small XLM-R.", least=1)

    def problems(self, settings: TrainSettings) -> list[str]:
        """Fields that are valid alone, but not together."""
        found = []
        if self.hidden_size % 32:
            found.append(f"hidden_size ({self.hidden_size}) is not a multiple of 32, the width of a head")
        if self.classes is not None:
            names = [name.strip() for name in self.classes.split(",")]
            if len(names) < 2 or len(set(names)) < len(names) or not all(names):
                found.append(f"classes: {self.classes!r} should name two or more, each once")
        if self.warmup_ratio and (settings.warmup_epochs or settings.warmup_steps):
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
