"""Short social text in classes, with a transformer of Hugging Face's and its Trainer's config files as they are."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fulltilt.recipes.recipe import Recipe, Translated, imported
from fulltilt.train.config import option

__all__ = ["RECIPE", "Options"]

# Hugging Face's name of a setting, and ours.
_SAME_THING = {
    "num_train_epochs": "epochs",
    "per_device_train_batch_size": "batch_size",
    "per_device_eval_batch_size": "eval_batch_size",
    "gradient_accumulation_steps": "accumulation",
    "learning_rate": "lr",
    "lr_scheduler_type": "schedule",
    "optim": "optimizer",
    "max_grad_norm": "clip_norm",
    "dataloader_num_workers": "workers",
    "dataloader_prefetch_factor": "prefetch",
    "dataloader_drop_last": "drop_last",
    "torch_compile": "compile",
    "save_steps": "save_every",
    "save_total_limit": "keep_last",
    "metric_for_best_model": "monitor",
    "greater_is_better": "monitor_mode",
    "output_dir": "out",
    "model_name_or_path": "model",
    "max_seq_length": "max_length",
}
_VALUES: dict[str, dict[Any, Any]] = {
    "optim": {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_bnb_8bit": "adamw8bit"},
    "lr_scheduler_type": {"constant_with_warmup": "constant"},
    "metric_for_best_model": {"f1": "macro_f1", "f1_macro": "macro_f1", "acc": "accuracy"},
    "greater_is_better": {True: "max", False: "min"},
    "max_grad_norm": {0: None},
}
_PER_DEVICE = ("per_device_train_batch_size", "per_device_eval_batch_size")
# Every training here logs, evaluates after each epoch, saves then, and pins what workers load; lengths are bucketed.
_DONE_ANYWAY = {
    "dataloader_persistent_workers",
    "dataloader_pin_memory",
    "do_train",
    "do_eval",
    "disable_tqdm",
    "eval_steps",
    "eval_strategy",
    "evaluation_strategy",
    "group_by_length",
    "logging_dir",
    "logging_first_step",
    "logging_steps",
    "logging_strategy",
    "overwrite_output_dir",
    "remove_unused_columns",
    "report_to",
    "save_strategy",
}


@dataclass(frozen=True, slots=True)
class Options:
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
        if self.tokens_per_batch and getattr(self, "residency", None) == "none":
            found.append("tokens_per_batch: residency none has torch's own loader, which has batch_size only")
        if self.warmup_ratio and (getattr(self, "warmup_epochs", 0) or getattr(self, "warmup_steps", None)):
            found.append("warmup_ratio, warmup_epochs and warmup_steps exclude each other; give only one of them")
        return found


def translate(given: Mapping[str, Any]) -> Translated:
    """The recipe's keys for a config that may use Hugging Face's."""
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    problems: list[str] = []
    for key, value in given.items():
        if key in ("fp16", "bf16"):
            if type(value) is not bool:
                problems.append(f"{key}: should be true or false, not {value!r}")
            continue
        if key in _DONE_ANYWAY or (key in _SAME_THING and value is None):  # null is Hugging Face's default
            continue
        if key not in _SAME_THING and (close := difflib.get_close_matches(key[:80], _SAME_THING, n=1, cutoff=0.9)):
            problems.append(f"{key}: there is no such setting; did you mean {close[0]}?")
            continue
        name = _SAME_THING.get(key, key)
        if name in values:
            problems.append(f"{key} says again what another key says; give only one of them (here it is {name})")
        values[name], names[name] = _converted(key, value), key
    if str(values.get("monitor")).endswith("loss"):
        values.setdefault("monitor_mode", "min")
    if "fp16" in given or "bf16" in given:
        if "precision" in values or (given.get("fp16") and given.get("bf16")):
            problems.append("fp16, bf16 and precision exclude each other; give only one of them")
        values["precision"] = "fp16" if given.get("fp16") else "bf16" if given.get("bf16") else "fp32"
    if unused := [key for key in given if key in _DONE_ANYWAY and given[key] is not None]:
        print(f"Without effect here: {', '.join(unused)} (see fulltilt train visobert --help)", file=sys.stderr)
    return Translated(values, problems, names)


def _converted(key: str, value: Any) -> Any:
    if key in _PER_DEVICE and type(value) is int:
        return value * int(os.environ.get("WORLD_SIZE", "1") or 1)
    if key == "num_train_epochs" and isinstance(value, float) and value.is_integer():
        return int(value)
    if key == "metric_for_best_model" and isinstance(value, str):
        value = value.removeprefix("eval_")
    known = _VALUES.get(key, {})
    return known.get(value, value) if isinstance(value, str | bool | int | float) else value


RECIPE = Recipe(
    name="visobert",
    about="Classify short social text with a transformer, configured with Hugging Face's keys.",
    options=Options,
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
