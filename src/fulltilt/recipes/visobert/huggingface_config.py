"""Translates the keys of Hugging Face's TrainingArguments to ours."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping
from typing import Any

from fulltilt.recipes.recipe import Translated

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
# Without effect: every training logs, evaluates and saves after each epoch, pins memory, and groups by length.
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


def translate(given: Mapping[str, Any]) -> Translated:
    """The recipe's keys of a config that may use Hugging Face's."""
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
