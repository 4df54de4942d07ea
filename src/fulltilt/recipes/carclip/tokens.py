"""Captions as numbers: a tokenizer trained on the captions themselves, for a model that starts from nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fulltilt.recipes import pretrained
from fulltilt.recipes.run_folder import refuse_foreign, written_by_library
from fulltilt.train.distributed import detect

START, END = "<|startoftext|>", "<|endoftext|>"
# Captions of cars are a few hundred words; what remains of it goes to their parts, so that no caption is unknown.
VOCABULARY = 4096


def trained_on(captions: Sequence[str]) -> Any:
    """A byte-pair tokenizer in Hugging Face's form. The same captions give the same tokenizer."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(sorted(set(captions)), trainer)
    made.post_processor = processors.TemplateProcessing(
        single=f"{START} $A {END}", special_tokens=[(START, 0), (END, 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token=START, eos_token=END, pad_token=END)


def kept_or_trained(home: Path, others: Sequence[Path], captions: Sequence[str]) -> Any:
    """The tokenizer in the first of ``others`` that has one; otherwise a new one, which is left in ``home``.

    A run that goes on, perhaps with more pictures, must read its captions as before. Raises ForeignFiles, DataError.
    """
    from transformers import PreTrainedTokenizerFast

    refuse_foreign(home)
    for folder in others:
        if (folder / "tokenizer.json").is_file():
            return pretrained.load("tokenizer", str(folder), PreTrainedTokenizerFast.from_pretrained, "Use --fresh.")
    made = trained_on(captions)
    if detect().rank == 0:
        with written_by_library(home) as private:
            made.save_pretrained(str(private))
    return made


def fixed_length(tokenizer: Any, captions: Sequence[str], most: int) -> int:
    """The tokens of the longest caption, in steps of 8 for the GPU's sake and at most what the model has room for."""
    longest = max((len(ids) for ids in tokenizer(list(captions))["input_ids"]), default=8)
    return min(-(-longest // 8) * 8, most)


def tokenised(tokenizer: Any, captions: Sequence[str], length: int) -> torch.Tensor:
    """int32 [captions, length]. A longer caption loses its end, but not the end token that its meaning is read from."""
    found = tokenizer(list(captions), padding="max_length", truncation=True, max_length=length)
    return torch.tensor(found["input_ids"], dtype=torch.int32)
