"""The recipe's settings as Hugging Face's TrainingArguments, with what this machine lacks switched off and said."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import torch
import transformers

from fulltilt.errors import UsageError
from fulltilt.recipes.pretrained import refuse_unavailable
from fulltilt.recipes.recipe import Request
from fulltilt.recipes.run_folder import refuse_to_replace
from fulltilt.recipes.visobert import Options
from fulltilt.train import precision
from fulltilt.train.config import TrainSettings
from fulltilt.train.distributed import Ranks, detect, device_of, part_of

GIVE = "Give the folder of a model, or its name on the hub if this machine can reach it."
EIGHT_BIT = "adamw_bnb_8bit"
_OPTIMIZERS = {"adamw": "adamw_torch", "adamw8bit": EIGHT_BIT, "adam": "adamw_torch", "sgd": "sgd"}
# What the engine has and Hugging Face's Trainer has not. Set to anything, they would be silently ignored.
_ENGINE_ONLY = (
    "ema_decay",
    "momentum",
    "channels_last",
    "deterministic",
    "drop_last",
    "sharding",
    "on_bad_sample",
    "max_bad_share",
    "bad_steps_in_a_row",
    "rollbacks",
    "spike_factor",
    "on_spike",
    "loss_scale_floor",
    "drift_every",
    "record",
    "profile_steps",
)


def check_options(request: Request) -> None:
    """Raise UsageError for settings that cannot be met, before anything is built."""
    options: Options = request.options
    defaults = {entry.name: entry.default for entry in fields(TrainSettings)}
    changed = [name for name in _ENGINE_ONLY if getattr(request.settings, name) != defaults[name]]
    if changed:
        raise UsageError(
            f"visobert trains with Hugging Face's Trainer, which has no {' and no '.join(changed)}", "Leave it out."
        )
    if options.model is not None:
        refuse_unavailable(options.model, GIVE)
        refuse_to_replace(options.model, request.out)
    _known("optim", options.optim, (name.value for name in transformers.training_args.OptimizerNames))
    _known("lr_scheduler_type", options.lr_scheduler_type, (name.value for name in transformers.SchedulerType))
    _try_schedule(options.lr_scheduler_type)
    if "8bit" in _optimizer(request) and _on_gpu(request) and importlib.util.find_spec("bitsandbytes") is None:
        raise UsageError(
            f"optim: {_optimizer(request)} needs bitsandbytes, which is not installed",
            "Install it: pip install bitsandbytes. Or set optim: adamw_torch_fused, which takes four times the memory.",
        )


def training_arguments(request: Request, steps_per_epoch: int, say: Callable[[str], None]) -> Any:
    """TrainingArguments for the request; ``steps_per_epoch`` counts optimizer steps."""
    settings, ranks = request.settings, detect()
    options: Options = request.options
    arithmetic = settings.precision
    optimizer = _optimizer(request)
    if not _on_gpu(request):
        off = [name for name, on in (("fp16", arithmetic == "fp16"), ("TF32", settings.tf32)) if on]
        if off:
            say(f"No GPU here: {' and '.join(off)} switched off, the arithmetic is float32")
        if "8bit" in optimizer:
            say(f"No GPU here: {optimizer} switched off (it saves GPU memory), the optimizer is adamw_torch")
            optimizer = "adamw_torch"
        arithmetic = "fp32" if arithmetic == "fp16" else arithmetic
    chosen = precision.choose(arithmetic, device_of(settings.device, ranks.local_rank)).name
    schedule, schedule_options = _schedule(request)
    total = total_steps(settings, steps_per_epoch)
    workers = part_of(settings.workers, ranks)
    made = transformers.TrainingArguments(
        output_dir=str(request.out),
        num_train_epochs=settings.epochs,
        max_steps=settings.max_steps if settings.max_steps is not None else -1,
        per_device_train_batch_size=per_rank(settings.batch_size, ranks),
        per_device_eval_batch_size=per_rank(settings.eval_batch_size or settings.batch_size, ranks),
        gradient_accumulation_steps=settings.accumulation,
        gradient_checkpointing=settings.gradient_checkpointing,
        learning_rate=settings.lr,
        weight_decay=settings.weight_decay,
        warmup_steps=_warmup_steps(settings, options.warmup_ratio, steps_per_epoch, total),
        lr_scheduler_type=schedule,
        lr_scheduler_kwargs=schedule_options,
        optim=optimizer,
        max_grad_norm=settings.clip_norm or 0.0,
        fp16=chosen == "fp16",
        bf16=chosen == "bf16",
        tf32=_tf32(request),
        torch_compile=settings.compile,
        use_cpu=not _on_gpu(request),
        seed=settings.seed,
        dataloader_num_workers=workers,
        dataloader_prefetch_factor=settings.prefetch if workers else None,
        dataloader_persistent_workers=options.dataloader_persistent_workers and workers > 0,
        dataloader_pin_memory=options.dataloader_pin_memory and _on_gpu(request),
        accelerator_config={"non_blocking": _on_gpu(request)},
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_strategy="no",
        # Looking at every loss would make the host wait for the GPU; the recipe looks some steps later.
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    made._n_gpu = min(made.n_gpu, 1)  # several GPUs train as ranks of torchrun, never as DataParallel in one process
    return made


def total_steps(settings: TrainSettings, steps_per_epoch: int) -> int:
    """Optimizer steps of the whole run."""
    return settings.max_steps if settings.max_steps is not None else settings.epochs * steps_per_epoch


def per_rank(count: int, ranks: Ranks) -> int:
    """A rank's part of a batch; every rank has the same."""
    if count % ranks.world:
        raise UsageError(f"a batch of {count} cannot be divided evenly among {ranks.world} GPUs", "Change batch_size.")
    return count // ranks.world


def _on_gpu(request: Request) -> bool:
    return device_of(request.settings.device, detect().local_rank).type == "cuda"


def _tf32(request: Request) -> bool | None:
    if not _on_gpu(request) or torch.cuda.get_device_capability() < (8, 0):
        return None  # Hugging Face refuses even False there
    return request.settings.tf32


def _optimizer(request: Request) -> str:
    options: Options = request.options
    name = options.optim or _OPTIMIZERS[request.settings.optimizer]
    return "adamw_torch_fused" if name == "adamw_torch" and _on_gpu(request) else name


def _schedule(request: Request) -> tuple[str, dict[str, float]]:
    options: Options = request.options
    settings = request.settings
    if options.lr_scheduler_type is not None:
        return options.lr_scheduler_type, {}
    if settings.schedule == "constant":
        return "constant_with_warmup", {}
    return ("cosine_with_min_lr", {"min_lr": settings.min_lr}) if settings.min_lr else ("cosine", {})


def _try_schedule(name: str | None) -> None:
    """Raise UsageError for a schedule that needs more than its name."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    try:
        if name is not None:
            transformers.get_scheduler(name, optimizer, num_warmup_steps=1, num_training_steps=10)
    except (TypeError, ValueError) as error:
        raise UsageError(f"lr_scheduler_type: {name} needs settings that visobert has not ({error})") from error


def optimizer_name(arguments: Any) -> str:
    """Hugging Face's name of the optimizer."""
    return str(getattr(arguments.optim, "value", arguments.optim))


def try_optimizer(arguments: Any, model: Any) -> None:
    """Raise UsageError for an optimizer that is not installed, or needs more than its name."""
    try:
        transformers.Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    except (ImportError, ValueError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        name = optimizer_name(arguments)
        raise UsageError(f"optim: {name} cannot be had: {first[:200]}", "Choose another optim.") from error


def _warmup_steps(settings: TrainSettings, ratio: float, steps_per_epoch: int, total: int) -> int:
    if settings.warmup_steps is not None:
        return settings.warmup_steps
    return round(settings.warmup_epochs * steps_per_epoch if settings.warmup_epochs else ratio * total)


def _known(key: str, name: str | None, known: Iterable[str]) -> None:
    names = sorted(known)
    if name is None or name in names:
        return
    close = difflib.get_close_matches(name[:80], names, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise UsageError(f"{key}: there is no {name!r}{hint}", f"Hugging Face has {', '.join(names)[:300]}.")
