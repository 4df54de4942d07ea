"""From labelled texts to a fine-tuned model: data, model, Trainer and checkpoints put together."""

from __future__ import annotations

import contextlib
import json
import math
import pickle
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from fulltilt.errors import DoesNotFit, RunFolderError, StoppedEarly, UsageError
from fulltilt.feed.text import Batching, Tokens, tokenise
from fulltilt.integrations.huggingface import FulltiltCallback, asked_of
from fulltilt.recipes.recipe import Request
from fulltilt.recipes.run_folder import written_by_library
from fulltilt.recipes.visobert import Options
from fulltilt.recipes.visobert.arguments import optimizer_name, per_rank, total_steps, training_arguments, try_optimizer
from fulltilt.recipes.visobert.checkpoints import (
    DECISIVE,
    STATE_FILE,
    best,
    expected_bytes,
    losses_of,
    position_in,
    refusals_told,
    refuse_other,
    regrouped,
    settings_of,
    starting_point,
    steps_made,
    steps_of,
    take_folder,
)
from fulltilt.recipes.visobert.data import (
    WIDTH_MULTIPLE,
    BucketSampler,
    Split,
    Texts,
    TokenisedTexts,
    read_texts,
    resident,
)
from fulltilt.recipes.visobert.model import keep_tokenizer, load_model, load_tokenizer
from fulltilt.recipes.visobert.trainer import (
    ClassLoss,
    EvaluateEvery,
    Figures,
    StopAndSave,
    TextTrainer,
    classification,
)
from fulltilt.records import Sample, Settings
from fulltilt.train.checkpoint import KeepPolicy
from fulltilt.train.cuda_graphs import graphs_wanted
from fulltilt.train.distributed import Group, detect, device_of
from fulltilt.train.guards import is_out_of_memory
from fulltilt.train.progress import Screen
from fulltilt.train.record import IdleGpu
from fulltilt.train.sampler import seed_everything
from fulltilt.train.stop import StopRequest
from fulltilt.train.train_state import KeptSettings
from fulltilt.train.weight_import import reason


def run(request: Request) -> Mapping[str, float]:
    """Train and return the last metrics; the model of the end lies in ``OUT/model``. Raises FulltiltErrors."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    settings, ranks = request.settings, detect()
    screen = Screen(request.out, speaks=ranks.rank == 0)
    stop = StopRequest(settings.max_time_s)
    with stop.listening(), screen, contextlib.ExitStack() as cleanup:
        root = request.out / "checkpoints"
        # The ranks meet here, before the Trainer would let them: none may look at a folder that another clears.
        group = Group(ranks, device_of(settings.device, ranks.local_rank), settings.hang_timeout_s)
        cleanup.callback(group.close)
        if group.first:
            take_folder(request, root, screen, cleanup)
        group.barrier()
        begin = starting_point(request, root, screen)
        texts = read_texts(request.data, request.options, settings.seed)
        if group.first:
            keep_tokenizer(request.options, texts.train.texts, request.out / "tokenizer", fresh=request.fresh)
        group.barrier()
        seed_everything(settings.seed)
        made = Fitting(request, texts, screen, stop)
        if begin is not None:
            made.take_up(begin)
        if begin is not None and made.position >= made.total_steps:
            screen.say(f"All {made.total_steps} steps are done already; --fresh begins anew")
            return made.kept_metrics(begin)
        if begin is not None:
            refuse_other(begin, made.trainer.model, optimizer_name(made.trainer.args))
            screen.say(f"Resuming from {begin} (step {made.position + made.trainer.steps_apart})")
            made.note_changes()
        return made.fit(begin)


class Fitting:
    """One run of the Trainer: everything it is made of."""

    def __init__(self, request: Request, texts: Texts, screen: Screen, stop: StopRequest) -> None:
        self.request, self.screen, self.stop = request, screen, stop
        self.options: Options = request.options
        settings, ranks = request.settings, detect()
        self.root = request.out / "checkpoints"
        device = device_of(settings.device, ranks.local_rank)
        self.tokenizer = load_tokenizer(self.options, request.out / "tokenizer")
        train, validation = (self._tokens(split) for split in (texts.train, texts.validation))
        size = per_rank(settings.batch_size, ranks)
        self.sampler: BucketSampler | None = None
        batches = math.ceil(len(texts.train.texts) / (size * ranks.world))
        datasets: list[Any] = [
            TokenisedTexts(train, texts.train.labels),
            TokenisedTexts(validation, texts.validation.labels),
        ]
        if settings.residency != "none":
            batching = self._batching(size)
            self.sampler = BucketSampler(train.lengths, batching, ranks.rank, ranks.world, self._next_batch, device)
            batches = len(self.sampler)
            pad = self.tokenizer.pad_token_id
            datasets[0] = resident(train, texts.train.labels, pad, device)
            if ranks.world == 1:
                datasets[1] = resident(validation, texts.validation.labels, pad, device)
        self.per_epoch = math.ceil(batches / settings.accumulation)
        self.position = 0  # the step it begins with, counted by the epochs of now
        self.total_steps = total_steps(settings, self.per_epoch)
        self._build(texts, datasets, device)

    def take_up(self, begin: Path) -> None:
        """Find out where ``begin`` stands: with other batches an epoch has another number of steps.

        ``max_steps`` is a number of steps whatever they hold, so that with it they are counted on.
        """
        self.kept_settings.load_state_dict(settings_of(begin))
        self.position, made = steps_of(begin), steps_made(begin)
        if DECISIVE & set(self.kept_settings.changed) and self.request.settings.max_steps is None:
            self.position = self.trainer.position = position_in(begin, self.per_epoch)
        self.trainer.steps_apart = made - self.position

    def note_changes(self) -> None:
        """Say what is set otherwise than in the run that goes on, and what follows from it."""
        if self.kept_settings.changed:
            self.screen.say(f"Changed since: {', '.join(self.kept_settings.changes)}")
        if DECISIVE & set(self.kept_settings.changed):
            epoch, done = divmod(self.position, self.per_epoch)
            self.screen.say(
                f"An epoch has {self.per_epoch} steps now; epoch {epoch + 1} goes on after {done} of them"
                if done
                else f"An epoch has {self.per_epoch} steps now; epoch {epoch + 1} begins"
            )

    def fit(self, begin: Path | None) -> Mapping[str, float]:
        """Train to the end, or until somebody asks to stop."""
        settings = self.request.settings
        used = min(detect().world, torch.cuda.device_count()) if self.trainer.args.device.type == "cuda" else 0
        gpus = [torch.cuda.get_device_name(number) for number in range(used)]
        self.trainer.check_space()
        if begin is not None:
            self.figures.losses_before = losses_of(begin) if self.position % self.per_epoch else []
        arithmetic = asked_of(self.trainer.args).precision or "fp32"
        self.screen.begin("visobert", settings, arithmetic, math.ceil(self.total_steps / self.per_epoch), gpus)
        try:
            with self._as_the_trainer_takes_it(begin) as taken:
                self.trainer.train(resume_from_checkpoint=None if taken is None else str(taken))
        except BaseException as error:
            if self.recorder is not None:
                with contextlib.suppress(RunFolderError):  # what ended the training is to be told, not what followed
                    self.recorder.recording.stop(error=error)
            if is_out_of_memory(error):
                raise does_not_fit(settings.batch_size) from error
            if isinstance(error, pickle.UnpicklingError) and begin is not None:
                raise holds_code(begin, error) from error
            raise
        if self.stopper.ended_early:
            step = self.trainer.state.global_step + self.trainer.steps_apart
            raise StoppedEarly(
                f"stopped: {self.stop.reason or 'another rank was asked to stop'}; step {step} is saved in {self.root}",
                "Run the same command again to go on from there.",
            )
        self._keep_model()
        return last_metrics(self.trainer.state.log_history)

    def _as_the_trainer_takes_it(self, begin: Path | None) -> contextlib.AbstractContextManager[Path | None]:
        if begin is None or self.position == steps_of(begin):
            return contextlib.nullcontext(begin)
        return regrouped(begin, self.position, self.per_epoch)

    def kept_metrics(self, begin: Path) -> Mapping[str, float]:
        """The metrics of a run that is already done."""
        return last_metrics(json.loads((begin / STATE_FILE).read_text())["log_history"])

    # ----------------------------------------------------------------------- parts

    def _build(self, texts: Texts, datasets: list[Any], device: torch.device) -> None:
        settings, options = self.request.settings, self.options
        self.kept_settings = KeptSettings(settings, len(texts.train.texts))
        classes = len(texts.classes)
        weights = torch.tensor(texts.balanced_weights()) if options.class_weights == "balanced" else None
        loss = ClassLoss(weights, options.label_smoothing_factor)
        model = load_model(options, self.tokenizer, texts.classes)
        arguments = training_arguments(self.request, self.per_epoch, self.screen.say)
        try_optimizer(arguments, model)
        self.recorder = self._recorder(device, arguments) if detect().rank == 0 else None
        self.figures = Figures(
            self.screen, settings, loss, self.sampler, len(texts.train.texts), self.per_epoch, device
        )
        self.stopper = StopAndSave(self.stop, settings.save_every, self.per_epoch, self.recorder)
        replays = graphs_wanted(settings, device, alone=detect().world == 1) and not settings.compile
        self.trainer = self.stopper.trainer = TextTrainer(
            sampler=self.sampler,
            root=self.root,
            policy=KeepPolicy(settings.keep_last, settings.keep_best, settings.monitor_mode),
            monitor=settings.monitor,
            waited=self.screen.loaded,
            losses_so_far=self.figures.losses_so_far,
            kept_settings=self.kept_settings,
            replays=self.screen.warn if replays else None,
            model=model,
            args=arguments,
            train_dataset=datasets[0],
            eval_dataset=datasets[1],
            processing_class=self.tokenizer,
            data_collator=transformers.DataCollatorWithPadding(self.tokenizer, pad_to_multiple_of=WIDTH_MULTIPLE),
            compute_loss_func=loss,
            compute_metrics=lambda found: classification(
                torch.as_tensor(found.predictions).argmax(-1), torch.as_tensor(found.label_ids), classes
            ),
            # The recorder last: it looks whether the others have asked for a save, whose time is then a checkpoint's.
            callbacks=[
                EvaluateEvery(settings.eval_every, self.per_epoch),
                self.figures,
                self.stopper,
                *([] if self.recorder is None else [self.recorder]),
            ],
        )
        self.trainer.remove_callback(transformers.PrinterCallback)
        self.screen.say(
            f"{len(texts.train.texts):,} training and {len(texts.validation.texts):,} validation texts, "
            f"{classes} classes; {_millions(sum(p.numel() for p in model.parameters()))} parameters"
        )

    def _recorder(self, device: torch.device, arguments: Any) -> FulltiltCallback:
        out, screen = self.request.out, self.screen
        idle = IdleGpu(self.request.settings, screen, out) if device.type == "cuda" else None

        def sampled(sample: Sample) -> None:
            screen.note(sample)
            if idle is not None:
                idle(sample)

        return FulltiltCallback(out, on_sample=sampled, asked=self._asked(arguments))

    def _asked(self, arguments: Any) -> Settings:
        """What the run was told. The Trainer's arguments do not know the budget of tokens, nor where the data lives."""
        settings = self.request.settings
        return replace(
            asked_of(arguments),
            num_workers=settings.workers,
            prefetch_factor=settings.prefetch,
            batch_size=None if self.options.tokens_per_batch else settings.batch_size,
            residency=settings.residency,
        )

    def _tokens(self, split: Split) -> Tokens:
        def cut(texts: list[str]) -> Any:
            return self.tokenizer(texts, truncation=True, max_length=self.options.max_length)

        return tokenise(split.texts, cut)

    def _batching(self, size: int) -> Batching:
        budget = self.options.tokens_per_batch
        return Batching(None if budget else size, budget, multiple=WIDTH_MULTIPLE, seed=self.request.settings.seed)

    def _next_batch(self) -> int:
        """The number of the first batch of the Trainer's present epoch; after a resume it skips within it by itself."""
        assert self.sampler is not None
        return int(self.trainer.state.global_step) // self.per_epoch * len(self.sampler)

    def _keep_model(self) -> None:
        """Leave the model and its tokenizer in ``OUT/model``, complete or not at all."""
        if not self.trainer.is_world_process_zero():
            return
        final = self.request.out / "model"
        chosen = best(self.root, self.request.settings.monitor_mode) if self.options.load_best_model_at_end else None
        with refusals_told(final, expected_bytes(self.trainer.model)), written_by_library(final) as private:
            self.trainer.save_model(str(private))
            for weights in chosen.glob("model*.safetensors*") if chosen is not None else ():
                shutil.copyfile(weights, private / weights.name)
        self.screen.say(f"The {'best' if chosen else 'last'} model is in {final}")


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count:,}"


def last_metrics(history: list[dict[str, float]]) -> dict[str, float]:
    """Those of the last evaluation in the Trainer's history."""
    last = next((entry for entry in reversed(history) if "eval_loss" in entry), {})
    return {name: value for name, value in last.items() if name.startswith("eval_")}


def does_not_fit(batch_size: int) -> DoesNotFit:
    """The error for memory that ran out."""
    return DoesNotFit(
        f"memory ran out with batches of {batch_size}",
        f"Set per_device_train_batch_size: {max(batch_size * 5 // 6, 1)}, gradient_checkpointing: true,"
        " a smaller per_device_eval_batch_size, or optim: adamw_bnb_8bit.",
    )


def holds_code(folder: Path, error: Exception) -> UsageError:
    """The error for a checkpoint that is refused because loading it could run code."""
    return UsageError(
        f"{folder} is refused: it holds more than tensors, and loading it could run code ({reason(error)})",
        "To begin with its weights alone, give the folder as model.",
    )
