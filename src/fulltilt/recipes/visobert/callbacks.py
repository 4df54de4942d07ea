"""What the recipe does between the Trainer's steps: show figures, stop on request, save every so often."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import TrainerCallback

from fulltilt.errors import Diverged
from fulltilt.integrations.huggingface import FulltiltCallback
from fulltilt.recipes.visobert.batches import BucketSampler
from fulltilt.recipes.visobert.trainer import ClassLoss, TextTrainer
from fulltilt.train.config import TrainSettings
from fulltilt.train.guards import StepFigures
from fulltilt.train.metrics_log import AsyncMetrics
from fulltilt.train.progress import Screen
from fulltilt.train.stop import StopRequest

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
