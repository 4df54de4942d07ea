"""Inside a trial: its settings put in force without a change to the script.

Loader settings go into the arguments of the training loader. Precision and compilation, which a script writes into its
loop, are put around it from outside: well enough to measure them, not meant for a real run. Accumulation is not: its
parts are measured with an optimizer step each, which costs a little more and needs the same memory.
"""

from __future__ import annotations

import inspect
from typing import Any

from fulltilt.recorder.hooks import Patches
from fulltilt.recorder.hooks.dataloader import override_fastai
from fulltilt.recorder.loaders import LoaderTaps, call_sites
from fulltilt.recorder.loaders.settings_file import LoaderOverride, looks_like_training
from fulltilt.records import LoaderRecord, Settings


class AppliedSettings(LoaderOverride):
    """Puts a trial's settings in force as the script constructs what they concern."""

    def __init__(self, settings: Settings, loader: LoaderRecord | None) -> None:
        super().__init__(settings)
        self._loader = loader
        self.remarks: list[str] = []

    def install(self, torch: Any, taps: LoaderTaps) -> None:
        """Stand in the way of what the settings concern, and of nothing else."""
        taps.override = self
        override_fastai(Patches(), self._settings)
        if self._settings.precision is not None:
            _compute_in(torch, self._settings.precision)
        if self._settings.compile:
            _compile_first_trained(torch)

    def is_for(self, loader: Any, given: dict[str, Any]) -> bool:
        """Whether it is the loader that is studied; before it is known, whether it looks like one that trains."""
        wanted = self._loader
        if wanted is None or wanted.where is None:
            return looks_like_training(given)
        sites = call_sites(loader)
        if sites.where != wanted.where or _length(given.get("dataset")) != wanted.dataset_len:
            return False
        # A library makes all its loaders at the same line of the user's.
        return sites.made_by is None or looks_like_training(given)

    def changed(self, given: dict[str, Any]) -> dict[str, Any]:
        """The loader's arguments with the settings in force, the batch size among them."""
        changed = super().changed(given)
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


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:
        return None


def _compute_in(torch: Any, precision: str) -> None:
    if precision == "tf32":
        torch.set_float32_matmul_precision("high")
        return
    torch.autocast("cuda" if torch.cuda.is_available() else "cpu", dtype=torch.bfloat16).__enter__()
    # Autocast keeps its copies of the weights until it ends; here it never ends, and each step changes them.
    optimizers: Any = inspect.getmodule(torch.optim.Optimizer)
    optimizers.register_optimizer_step_post_hook(lambda *_: torch.clear_autocast_cache())


def _compile_first_trained(torch: Any) -> None:
    """Compile the first module that is called with parameters to train: the model, before its parts."""

    def first_call(module: Any, _inputs: Any) -> None:
        if module.training and any(parameter.requires_grad for parameter in module.parameters()):
            handle.remove()
            module.compile()

    handle = torch.nn.modules.module.register_module_forward_pre_hook(first_call)
