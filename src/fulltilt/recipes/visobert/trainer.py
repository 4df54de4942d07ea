"""Hugging Face's Trainer with our batches, our loss and our checkpoints; everything else is its own."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import Trainer

from fulltilt.recipes.run_folder import remove_private
from fulltilt.recipes.visobert import masks, structure
from fulltilt.recipes.visobert.arguments import optimizer_name
from fulltilt.recipes.visobert.batches import BucketSampler, ResidentTexts, loader, sorted_batches
from fulltilt.recipes.visobert.disk import expected_bytes, refusals_told
from fulltilt.recipes.visobert.folder import LOSSES_FILE, OPTIMIZER_FILE
from fulltilt.recipes.visobert.regrouping import set_schedule
from fulltilt.store import OwnedFolder
from fulltilt.train import checkpoint
from fulltilt.train.build import SLOW_DISK_BYTES_PER_S
from fulltilt.train.checkpoint import KeepPolicy
from fulltilt.train.checkpoint_writer import check_space
from fulltilt.train.cuda_graphs import GraphedModel
from fulltilt.train.train_state import KeptSettings


class ClassLoss:
    """Cross-entropy with class weights and label smoothing. ``total`` sums what a step has brought so far."""

    def __init__(self, weights: torch.Tensor | None, smoothing: float) -> None:
        self.weights, self.smoothing = weights, smoothing
        self.total: torch.Tensor | None = None

    def __call__(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        """The loss of a micro-batch as its share of the step, as the Trainer asks for it."""
        logits = outputs["logits"].float()
        if self.weights is not None and self.weights.device != logits.device:
            self.weights = self.weights.to(logits.device)
        summed = functional.cross_entropy(
            logits, labels, weight=self.weights, label_smoothing=self.smoothing, reduction="sum"
        )
        loss = summed / (len(labels) if num_items_in_batch is None else num_items_in_batch)
        if torch.is_grad_enabled():
            self.total = loss.detach() if self.total is None else self.total + loss.detach()
        return loss

    def taken(self) -> torch.Tensor:
        """The loss of the step that has just ended, on the device."""
        total, self.total = self.total, None
        assert total is not None
        return total


class TextTrainer(Trainer):  # type: ignore[misc]
    """``train_dataset`` and ``eval_dataset`` are ResidentTexts, or data sets for the Trainer's own loader.

    ``replays``: replay the model as CUDA graphs, and say here where that cannot be done.
    """

    def __init__(
        self,
        *,
        sampler: BucketSampler | None,
        root: Path,
        policy: KeepPolicy,
        monitor: str | None,
        waited: Callable[[float, int], None],
        losses_so_far: Callable[[], list[float]],
        kept_settings: KeptSettings,
        replays: Callable[[str], None] | None,
        **hugging_face: Any,
    ) -> None:
        self.sampler = sampler
        self.root, self.policy, self.monitor = root, policy, monitor
        self._waited, self._losses_so_far = waited, losses_so_far
        self._kept_settings = kept_settings
        self._writing_to: Path | None = None
        self.steps_apart = 0  # steps made less those that the Trainer counts; see regrouping.py
        self.position: int | None = None  # where it goes on, if that is not what the checkpoint says
        super().__init__(**hugging_face)
        structure.remember(self.model)
        self._whole_masks = masks.answers_alike(self.model, self.processing_class.pad_token_id)
        for texts in (self.train_dataset, self.eval_dataset):
            if self._whole_masks and isinstance(texts, ResidentTexts):
                texts.mask_type = torch.bool  # which they would be turned into
        if replays is not None:
            GraphedModel(self.model, self.model, replays)
        self._dense_parameters = self.model.num_parameters(exclude_embeddings=True)
        self.checkpoint_bytes = expected_bytes(self.model, optimizer_name(self.args))
        self.longest_save_s = self.checkpoint_bytes / SLOW_DISK_BYTES_PER_S  # until one has been measured

    # ----------------------------------------------------------------------- batches

    def get_train_dataloader(self) -> Any:
        """See Trainer."""
        if self.sampler is None:
            return super().get_train_dataloader()
        return loader(self.train_dataset, self.sampler)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """See Trainer. Several ranks share an evaluation out in the Trainer's own way."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if not isinstance(dataset, ResidentTexts):
            return super().get_eval_dataloader(eval_dataset)
        return loader(dataset, sorted_batches(dataset, self.args.per_device_eval_batch_size))

    def get_batch_samples(self, *drawn: Any, **how: Any) -> Any:
        """See Trainer. Here it waits for data."""
        began = time.perf_counter()
        batches, items = super().get_batch_samples(*drawn, **how)
        self._waited(time.perf_counter() - began, len(batches))
        return batches, items

    # ----------------------------------------------------------------------- what a step would do needlessly

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """See Trainer."""
        ready: dict[str, Any] = super()._prepare_inputs(inputs)
        if self._whole_masks:
            ready["attention_mask"] = masks.whole(ready["attention_mask"])
        return ready

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """See Trainer, which lets the device count. A text has one label, so that the host knows."""
        if self.args.world_size > 1:
            return super()._get_num_items_in_batch(batch_samples, device)
        return sum(len(batch["labels"]) for batch in batch_samples)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """See Trainer, which counts the model's parameters anew in each step."""
        return int(6 * inputs["input_ids"].numel() * self._dense_parameters)

    # ----------------------------------------------------------------------- checkpoints

    def check_space(self) -> None:
        """Raise MachineError unless the checkpoints that are kept will fit."""
        if self.is_world_process_zero():
            check_space(self.root, self.checkpoint_bytes, self.policy)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._writing_to or super()._get_output_dir(trial))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write what the Trainer writes, but into a folder that appears under its name when it is whole."""
        losses = self._losses_so_far()
        began = time.monotonic()
        step = self.state.global_step + self.steps_apart
        with self._partial(step) as partial:
            with refusals_told(partial, self.checkpoint_bytes):
                super()._save_checkpoint(model, trial)
            self._barrier()
            if self.is_world_process_zero():
                made = partial / f"checkpoint-{self.state.global_step}"
                with refusals_told(partial, self.checkpoint_bytes):
                    kept = self._kept_settings.state_dict()
                    told = {"optim": optimizer_name(self.args), "steps": step, "settings": kept}
                    (made / OPTIMIZER_FILE).write_text(json.dumps(told) + "\n")
                    (made / LOSSES_FILE).write_text(json.dumps(losses) + "\n")
                OwnedFolder(self.root.parent).record_tree(made)
                checkpoint.adopt(self.root, made, step, int(self.state.epoch), self._metric())
                checkpoint.delete_old(self.root, self.policy)
            self._barrier()
        self.longest_save_s = max(self.longest_save_s, time.monotonic() - began)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """See Trainer, which takes these settings from the checkpoint: one that was changed since has to win."""
        groups = self.optimizer.param_groups
        decays, rates = [group["weight_decay"] for group in groups], list(getattr(self.lr_scheduler, "base_lrs", ()))
        super()._load_optimizer_and_scheduler(checkpoint)
        changed = self._kept_settings.changed
        if "weight_decay" in changed:
            for group, decay in zip(self.optimizer.param_groups, decays, strict=True):
                group["weight_decay"] = decay
        if "lr" in changed and rates:
            before, self.lr_scheduler.base_lrs = self.lr_scheduler.base_lrs, rates
            for group, old, new in zip(self.optimizer.param_groups, before, rates, strict=True):
                group["lr"], group["initial_lr"] = group["lr"] * new / old, new
        if self.position is not None:
            set_schedule(self.lr_scheduler, self.optimizer.param_groups, self.position)

    @contextlib.contextmanager
    def _partial(self, step: int) -> Iterator[Path]:
        # One name for all ranks, which write their random states into the same folder.
        self._writing_to = partial = self.root / f".partial-{checkpoint.folder_name(step)}"
        folder = OwnedFolder(self.root.parent)
        if self.is_world_process_zero():
            folder.make(partial)
        self._barrier()
        try:
            yield partial
        finally:
            self._writing_to = None
            if self.is_world_process_zero():
                remove_private(folder, f"{self.root.name}/{partial.name}")

    def _metric(self) -> float | None:
        """What the checkpoint is rated by: the evaluation of this very step, if there was one."""
        last = next((entry for entry in reversed(self.state.log_history) if "eval_loss" in entry), None)
        if last is None or last["step"] != self.state.global_step or self.monitor is None:
            return None
        value = last.get(f"eval_{self.monitor.removeprefix('eval_')}")
        return None if value is None else float(value)

    def _barrier(self) -> None:
        if self.args.world_size > 1:
            torch.distributed.barrier()
