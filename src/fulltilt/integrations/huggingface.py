"""Hugging Face Trainer: ``Trainer(..., callbacks=[FulltiltCallback("runs/a")])`` records training and explains it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fulltilt.errors import UsageError
from fulltilt.recorder.manual_recording import Recording
from fulltilt.records import Settings

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise UsageError(
        "the Hugging Face callback needs transformers", 'Install it: pip install "fulltilt[hf]"'
    ) from error


class FulltiltCallback(TrainerCallback):  # type: ignore[misc]
    """Records from the start of training to its end; marks epochs, evaluations and checkpoints."""

    def __init__(self, folder: str | Path = "fulltilt-runs/trainer") -> None:
        self.recording = Recording(folder)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Training starts."""
        self.recording.start(asked_of(args))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """An epoch starts."""
        self.recording.mark_epoch(int(state.epoch or 0))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A step has ended: the trainer may evaluate and save next."""
        if control.should_save and not control.should_evaluate:
            self.recording.mark_checkpoint(True)

    on_epoch_end = on_step_end

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A step of an evaluation."""
        self.recording.mark_validation(True)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The evaluation has ended."""
        self.recording.mark_validation(False)
        if control.should_save:
            self.recording.mark_checkpoint(True)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A checkpoint has been written."""
        self.recording.mark_checkpoint(False)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Training has ended."""
        self.recording.mark_checkpoint(False)
        self.recording.stop()


def asked_of(args: Any) -> Settings:
    """The settings in TrainingArguments; the batch size is that of all ranks together."""
    return Settings(
        num_workers=args.dataloader_num_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
        pin_memory=args.dataloader_pin_memory,
        persistent_workers=args.dataloader_persistent_workers,
        batch_size=args.train_batch_size * args.world_size,
        accumulation=args.gradient_accumulation_steps,
        precision="bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        compile=args.torch_compile,
    )
