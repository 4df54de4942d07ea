"""Inside a trial: its settings put in force without a change to the script.

Loader settings go into the arguments of the training loader. Precision, compilation and accumulation, which a script
writes into its loop, are put around it from outside: well enough to measure them, not meant for a real run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from fulltilt.recorder.loaders import call_sites
from fulltilt.recorder.loaders.overrides import apply, looks_like_training
from fulltilt.records import Settings
from fulltilt.tuning.trial.accumulation import Accumulation, around
from fulltilt.tuning.trial.assignment import TrainingLoader

AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}


class AppliedSettings:
    """Puts a trial's settings in force as the script constructs what they concern."""

    def __init__(self, torch: Any, settings: Settings, loader: TrainingLoader | None) -> None:
        self._torch = torch
        self._settings = settings
        self._loader = loader
        self.remarks: list[str] = []

    def install(self) -> None:
        """Stand in the way of what the settings concern, and of nothing else."""
        settings, torch = self._settings, self._torch
        if settings.torch_threads is not None:
            torch.set_num_threads(settings.torch_threads)
        around(torch.utils.data.DataLoader, "__init__", self._loader_init)
        if settings.accumulation is not None and settings.accumulation > 1:
            Accumulation(torch, settings.accumulation).install()
        if settings.precision is not None:
            self._compute_in(settings.precision)
        if settings.compile:
            self._compile_first_trained()

    # ------------------------------------------------------------------ the loader

    def _loader_init(self, original: Callable[..., None]) -> Callable[..., None]:
        def __init__(loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            bound = _bound(original, args, kwargs)
            if bound is None or not self._is_training_loader(loader, bound):
                return original(loader, *args, **kwargs)
            changed = self.arguments(bound)
            return original(loader, changed.pop("dataset", None), **changed)

        return __init__

    def _is_training_loader(self, loader: Any, given: dict[str, Any]) -> bool:
        wanted = self._loader
        if wanted is None or wanted.where is None:
            return looks_like_training(given)
        sites = call_sites(loader)
        if sites.where != wanted.where or _length(given.get("dataset")) != wanted.dataset_len:
            return False
        # A library makes all its loaders at the same line of the user's.
        return sites.made_by is None or looks_like_training(given)

    def arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """The loader's arguments with the settings in force."""
        changed = apply(self._settings, given)
        batch_size = self._settings.batch_size
        if batch_size is None:
            return changed
        if given.get("batch_sampler") is not None:
            # A library makes its loader around the sampler of one that was changed already, or it is the user's own.
            if getattr(given["batch_sampler"], "batch_size", None) != batch_size:
                self.remarks.append("the loader draws through a batch_sampler, whose batch size is its own")
        elif given.get("batch_size", 1) is None:
            self.remarks.append("the data set makes its batches itself (batch_size=None)")
        else:
            changed["batch_size"] = batch_size
        return changed

    # ------------------------------------------------------------------ the loop

    def _compute_in(self, precision: str) -> None:
        torch = self._torch
        if precision == "tf32":
            torch.set_float32_matmul_precision("high")
            return
        device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.autocast(device, dtype=getattr(torch, AUTOCAST[precision])).__enter__()
        # Autocast keeps its copies of the weights until it ends; here it never ends, and each step changes them.
        _hooks(torch).register_optimizer_step_post_hook(lambda *_: torch.clear_autocast_cache())

    def _compile_first_trained(self) -> None:
        """Compile the first module that is called with parameters to train: the model, before its parts."""
        modules = self._torch.nn.modules.module

        def first_call(module: Any, _inputs: Any) -> None:
            if module.training and any(parameter.requires_grad for parameter in module.parameters()):
                handle.remove()
                module.compile()

        handle = modules.register_module_forward_pre_hook(first_call)


def _hooks(torch: Any) -> Any:
    return inspect.getmodule(torch.optim.Optimizer)


def _bound(original: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    try:
        bound = inspect.signature(original).bind(None, *args, **kwargs)
    except TypeError:
        return None  # DataLoader itself will complain
    return {name: value for name, value in bound.arguments.items() if name != "self"}


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:
        return None
