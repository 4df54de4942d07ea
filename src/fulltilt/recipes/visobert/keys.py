"""A Hugging Face training config read as it is: its keys in the words that every recipe shares. No torch."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping
from typing import Any

from fulltilt.recipes.recipe import Translated

_SAME_THING = {
    "num_train_epochs": "epochs",
    "per_device_train_batch_size": "batch_size",
    "per_device_eval_batch_size": "eval_batch_size",
    "gradient_accumulation_steps": "accumulation",
    "learning_rate": "lr",
    "max_grad_norm": "clip_norm",
    "dataloader_num_workers": "workers",
    "dataloader_prefetch_factor": "prefetch",
    "dataloader_drop_last": "drop_last",
    "torch_compile": "compile",
    "save_steps": "save_every",
    "save_total_limit": "keep_last",
    "output_dir": "out",
    "model_name_or_path": "model",
    "max_seq_length": "max_length",
}
# What an evaluation measures, and how others call it.
MEASURED = ("loss", "macro_f1", "accuracy")
_ALIASES = {"f1": "macro_f1", "f1_macro": "macro_f1", "acc": "accuracy"}
_BEST = ("metric_for_best_model", "greater_is_better")
_PER_DEVICE = ("per_device_train_batch_size", "per_device_eval_batch_size")
# Every training here logs, evaluates after each epoch, saves then and keeps the best by itself; lengths are bucketed.
_DONE_ANYWAY = {
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


def translate(given: Mapping[str, Any]) -> Translated:
    """The recipe's keys for a config that may use Hugging Face's."""
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    problems: list[str] = []
    for key, value in given.items():
        if key in ("fp16", "bf16") and type(value) is not bool:
            problems.append(f"{key}: should be true or false, not {value!r}")
        if key in ("fp16", "bf16", *_BEST) or key in _DONE_ANYWAY:
            continue
        if key not in _SAME_THING and (close := difflib.get_close_matches(key[:80], _SAME_THING, n=1, cutoff=0.9)):
            problems.append(f"{key}: there is no such setting; did you mean {close[0]}?")
            continue
        name = _SAME_THING.get(key, key)
        if name in values:
            problems.append(f"{key} says again what another key says; give only one of them (here it is {name})")
        values[name], names[name] = _converted(key, value), key
    if "metric_for_best_model" in given:
        values = {**_best(given), **values}
    if "fp16" in given or "bf16" in given:
        if "precision" in values or (given.get("fp16") and given.get("bf16")):
            problems.append("fp16, bf16 and precision exclude each other; give only one of them")
        values["precision"] = "fp16" if given.get("fp16") else "bf16" if given.get("bf16") else "fp32"
    unused = [key for key in given if key in _DONE_ANYWAY]
    if unused:
        print(f"Not needed here: {', '.join(unused)} (logging, evaluating and saving are done anyway)", file=sys.stderr)
    return Translated(values, problems, names)


def _converted(key: str, value: Any) -> Any:
    if key in _PER_DEVICE and type(value) is int:
        return value * int(os.environ.get("WORLD_SIZE", "1") or 1)
    if key == "num_train_epochs" and isinstance(value, float) and value.is_integer():
        return int(value)
    if key == "max_grad_norm" and value == 0:
        return None
    return value


def _best(given: Mapping[str, Any]) -> dict[str, str]:
    """By which metric the best weights are chosen. A loss is better when it is smaller, unless that is denied."""
    asked = str(given["metric_for_best_model"]).removeprefix("eval_")
    metric = _ALIASES.get(asked, asked)
    if metric not in MEASURED:
        print(f"metric_for_best_model: {asked} is not measured; there are {', '.join(MEASURED)}", file=sys.stderr)
        return {}
    larger = given.get("greater_is_better")
    return {"monitor": metric, "monitor_mode": "max" if larger or (larger is None and metric != "loss") else "min"}
