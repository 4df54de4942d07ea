"""Hugging Face's Trainer with our batches, loss, metrics, checkpoints and callbacks; everything else is its own."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import Trainer, TrainerCallback

from fulltilt.errors import Diverged
from fulltilt.integrations.huggingface import FulltiltCallback
from fulltilt.recipes.run_folder import remove_private
from fulltilt.recipes.visobert.arguments import optimizer_name
from fulltilt.recipes.visobert.checkpoints import (
    LOSSES_FILE,
    OPTIMIZER_FILE,
    expected_bytes,
    refusals_told,
    set_schedule,
)
from fulltilt.recipes.visobert.data import BucketSampler, ResidentTexts, loader, sorted_batches
from fulltilt.recipes.visobert.model import remember_structure, takes_whole_masks, whole_mask
from fulltilt.store import OwnedFolder
from fulltilt.train import checkpoint
from fulltilt.train.build import SLOW_DISK_BYTES_PER_S
from fulltilt.train.checkpoint import KeepPolicy, check_space
from fulltilt.train.config import TrainSettings
from fulltilt.train.cuda_graphs import GraphedModel
from fulltilt.train.guards import StepFigures
from fulltilt.train.metrics_log import AsyncMetrics
from fulltilt.train.progress import Screen
from fulltilt.train.stop import StopRequest
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
        self.steps_apart = 0  # steps made less those that the Trainer counts; see ``regrouped``
        self.position: int | None = None  # where it goes on, if that is not what the checkpoint says
        super().__init__(**hugging_face)
        remember_structure(self.model)
        self._whole_masks = takes_whole_masks(self.model, self.processing_class.pad_token_id)
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
            ready["attention_mask"] = whole_mask(ready["attention_mask"])
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


# fp16 skips steps while it seeks its loss scale; this many in a row are no search. Any other step moves the weights.
MOST_SKIPPED_STEPS = 20


class Figures(TrainerCallback):  # type: ignore[misc]
    """Puts the engine's lines on the screen, from figures that leave the GPU some steps later."""

    def __init__(
        self,
        screen: Screen,
        settings: TrainSettings,
        loss: ClassLoss,
        sampler: BucketSampler | None,
        texts: int,
        per_epoch: int,
        device: torch.device,
    ) -> None:
        self.screen, self.settings, self.loss, self.sampler = screen, settings, loss, sampler
        self.texts, self.per_epoch = texts, per_epoch
        self.readout: AsyncMetrics[tuple[int, int]] = AsyncMetrics(device)
        self._served = 0
        self._bad = 0
        self._allowed = 0
        self._losses: list[float] = []
        self.losses_before: list[float] = []  # of the epoch that a resume goes on in

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """See TrainerCallback."""
        self._losses, self.losses_before = self.losses_before, []
        self._allowed = MOST_SKIPPED_STEPS if args.fp16 else 0
        epoch, done = divmod(state.global_step, self.per_epoch)
        self.screen.epoch_begins(epoch, self.per_epoch, done, left=state.max_steps - state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """See TrainerCallback."""
        # A whole batch, which the first one need not be: the rest of the data may come at any place.
        rows = min(args.train_batch_size * args.world_size, self.texts)
        samples = rows * args.gradient_accumulation_steps
        if self.sampler is None or self.sampler.batching.tokens_per_batch is None:
            self.screen.stepped(samples, args.gradient_accumulation_steps)
        if self.sampler is not None:
            samples, self._served = (self.sampler.served - self._served) * args.world_size, self.sampler.served
        self.readout.push((state.global_step, samples), self.loss.taken().reshape(1))
        self._show(self.readout.due())

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """See TrainerCallback."""
        self.settle()
        self.screen.epoch_trained()
        if not control.should_evaluate and _epoch_is_over(state, self.per_epoch):
            self._summarise(state, {})

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
        """See TrainerCallback. Evaluations come at the end of an epoch."""
        wanted = ("eval_loss", "eval_macro_f1", "eval_accuracy")
        self._summarise(state, {name: metrics[name] for name in wanted if name in metrics})
        target, monitor = self.settings.target, self.settings.monitor
        if target is not None and monitor is not None:
            name = f"eval_{monitor.removeprefix('eval_')}"
            history = [(entry["step"] / self.per_epoch, entry[name]) for entry in state.log_history if name in entry]
            self.screen.outlook(history, target, self.settings.monitor_mode)

    def _summarise(self, state: Any, shown: dict[str, float]) -> None:
        if self._losses:
            shown = {"train_loss": sum(self._losses) / len(self._losses), **shown}
        self.screen.epoch_ends((state.global_step - 1) // self.per_epoch, shown)

    def losses_so_far(self) -> list[float]:
        """The losses of the epoch up to here, for a checkpoint. Raises Diverged."""
        self.settle()
        return self._losses

    def settle(self) -> None:
        """Look at every figure that is still on its way. Raises Diverged."""
        self._show(self.readout.drain())

    def _show(self, figures: Any) -> None:
        for (step, samples), (loss,) in figures:
            self._bad = 0 if math.isfinite(loss) else self._bad + 1
            if self._bad:
                self.screen.warn(f"step {step}: the loss is {loss}")
            if self._bad > self._allowed:
                raise Diverged(
                    f"the loss has not been finite since step {step - self._allowed}",
                    "Lower learning_rate, lengthen the warm-up, or train with bf16 in place of fp16.",
                )
            if not self._bad:
                self._losses.append(loss)
            self.screen.step(StepFigures(step, loss, math.nan, bool(self._bad)), samples)


class EvaluateEvery(TrainerCallback):  # type: ignore[misc]
    """Lets the Trainer evaluate after every so many epochs only, and after the last step in any case."""

    def __init__(self, epochs: int, per_epoch: int) -> None:
        self.epochs, self.per_epoch = epochs, per_epoch

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """See TrainerCallback."""
        if state.global_step < state.max_steps and state.global_step // self.per_epoch % self.epochs:
            control.should_evaluate = False


class StopAndSave(TrainerCallback):  # type: ignore[misc]
    """Saves and stops at the step after a signal, or before the time is over; saves every ``save_every`` steps."""

    def __init__(
        self, stop: StopRequest, save_every: int | None, per_epoch: int, recorder: FulltiltCallback | None
    ) -> None:
        self.stop, self.save_every, self.per_epoch, self.recorder = stop, save_every, per_epoch, recorder
        self.trainer: TextTrainer | None = None
        self.ended_early = False
        self._within_epoch = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """See TrainerCallback. The last step of an epoch is left to the end of the epoch, which saves anyway."""
        assert self.trainer is not None
        self.stop.step_done(self.trainer.longest_save_s)
        if _epoch_is_over(state, self.per_epoch):
            return
        if self.save_every and state.global_step % self.save_every == 0:
            control.should_save = True
        if self._asked(args):
            self._within_epoch = control.should_save = True
            control.should_evaluate = False
            self._end(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """See TrainerCallback. An epoch that was cut short is neither evaluated nor saved a second time."""
        if self._within_epoch:
            control.should_evaluate = control.should_save = False
        elif state.global_step < state.max_steps and self._asked(args):
            self._end(control)

    def _asked(self, args: Any) -> bool:
        """Whether any rank was asked to stop: all of them have to stop at the same step."""
        asked = self.stop.reason is not None
        if args.world_size > 1:
            flag = torch.tensor(float(asked))  # from host to host: nobody waits for a GPU
            torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
            asked = bool(flag)
        return asked

    def _end(self, control: Any) -> None:
        control.should_training_stop = self.ended_early = True
        if self.recorder is not None:
            self.recorder.interrupted = True


def _epoch_is_over(state: Any, per_epoch: int) -> bool:
    return bool(state.global_step % per_epoch == 0 or state.global_step >= state.max_steps)


def classification(predicted: torch.Tensor, true: torch.Tensor, classes: int) -> dict[str, float]:
    """``macro_f1``, the mean F1 over the classes that occur, and ``accuracy``."""
    table = torch.bincount(true * classes + predicted, minlength=classes * classes).view(classes, classes).double()
    hits, asked, given = table.diagonal(), table.sum(1), table.sum(0)
    occurs = asked + given > 0
    f1 = 2 * hits[occurs] / (asked + given)[occurs]
    return {"macro_f1": float(f1.mean()), "accuracy": float(hits.sum() / table.sum())}
