"""Short social text in classes, with Hugging Face's Trainer (guide 4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fulltilt.recipes.recipe import Recipe, Request, option
from fulltilt.recipes.visobert.keys import MEASURED, translate

__all__ = ["RECIPE", "Options"]


@dataclass(frozen=True, slots=True)
class Options:
    """What only this recipe has. Names that Hugging Face has too mean the same here."""

    model: str | None = option(None, "A model's folder or hub name; without one a small XLM-R is made.")
    text_column: str = option("text", "Column with the text.")
    label_column: str = option("label", "Column with the label.")
    classes: str | None = option(None, "The labels, separated by commas; otherwise those of the training data.")
    val_share: float = option(0.1, "Share held out where there is no validation file.", above=0, most=0.5)
    max_length: int = option(128, "Tokens of a text at most.", least=4)
    tokens_per_batch: int | None = option(None, "Budget of tokens a batch, in place of the batch size.", least=16)
    class_weights: Literal["balanced", "none"] = option("balanced", "Weigh rare classes up.")
    label_smoothing_factor: float = option(0.0, "Share of each label given to all classes.", least=0, most=0.9)
    warmup_ratio: float = option(0.0, "Share of all steps in which the learning rate rises.", least=0, most=1)
    lr_scheduler_type: str | None = option(None, "A schedule of Hugging Face's, such as linear.")
    optim: str | None = option(None, "An optimizer of Hugging Face's, such as adamw_bnb_8bit.")
    load_best_model_at_end: bool = option(False, "Keep the best weights at the end, not the last.")
    dataloader_persistent_workers: bool = option(True, "Keep loader workers (with --residency none).")
    dataloader_pin_memory: bool = option(True, "Pin the loader's memory (with --residency none).")
    vocab_size: int = option(4000, "Pieces of the made model's tokenizer.", least=100)
    hidden_size: int = option(128, "Width of the made model; a multiple of 32.", least=32)
    num_hidden_layers: int = option(2, "Layers of the made model.", least=1)

    def problems(self) -> list[str]:
        """What is wrong between fields that are each right alone."""
        found = []
        if self.hidden_size % 32:
            found.append(f"hidden_size ({self.hidden_size}) is not a multiple of 32, the width of a head")
        if self.classes is not None:
            names = [name.strip() for name in self.classes.split(",")]
            if len(names) < 2 or len(set(names)) < len(names) or not all(names):
                found.append(f"classes: {self.classes!r} should name two or more, each once")
        return found + _contradictions(self)


def _contradictions(asked: Any) -> list[str]:
    """Settings of which one would be silently ignored beside another; some of them are the engine's."""
    found = []
    if asked.tokens_per_batch and getattr(asked, "residency", None) == "none":
        found.append("tokens_per_batch: residency none has the Trainer's own loader, which has batch_size only")
    if asked.lr_scheduler_type is not None:
        said = [
            name for name, unsaid in (("schedule", "cosine"), ("min_lr", 0)) if getattr(asked, name, unsaid) != unsaid
        ]
        found += [f"{name} and lr_scheduler_type exclude each other; give only one of them" for name in said]
    if asked.warmup_ratio and getattr(asked, "warmup_epochs", 0):
        found.append("warmup_ratio and warmup_epochs exclude each other; give only one of them")
    monitor = getattr(asked, "monitor", None)
    if monitor is not None and monitor.removeprefix("eval_") not in MEASURED:
        found.append(f"monitor: {monitor!r} is not measured; there are {', '.join(MEASURED)}")
    return found


def _check_options(request: Request) -> None:
    from fulltilt.recipes.visobert.arguments import check_arguments

    check_arguments(request)


def _check(request: Request) -> None:
    from fulltilt.recipes.visobert.texts import read_texts

    read_texts(request.data, request.options, request.settings.seed)


def _run(request: Request) -> Mapping[str, float]:
    from fulltilt.recipes.visobert.training import run

    return run(request)


RECIPE = Recipe(
    name="visobert",
    about="Classify short social text with a transformer and Hugging Face's Trainer (guide 4).",
    options=Options,
    check_options=_check_options,
    check=_check,
    run=_run,
    made="text",
    made_size=6000,
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
