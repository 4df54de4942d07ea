"""The model and its tokenizer, from a folder or the hub, or a small XLM-R that needs no download.

Two things keep the host from holding up the GPU in each step: masks that transformers need not look into, and a model
that remembers its own structure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from fulltilt.recipes import pretrained
from fulltilt.recipes.run_folder import written_by_library
from fulltilt.recipes.visobert import Options
from fulltilt.recipes.visobert.arguments import GIVE

_HEAD_WIDTH = 32
# XLM-R's own, in its own order: the ids 0 to 3 are fixed in its configuration.
_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


def load_tokenizer(options: Options, kept: Path) -> Any:
    """The tokenizer of the model, or the one that ``keep_tokenizer`` has left in ``kept``."""
    if options.model is not None:
        return pretrained.load("tokenizer", options.model, transformers.AutoTokenizer.from_pretrained, GIVE)
    return pretrained.load("tokenizer", str(kept), transformers.PreTrainedTokenizerFast.from_pretrained, GIVE)


def keep_tokenizer(options: Options, texts: Sequence[str], kept: Path, *, fresh: bool) -> None:
    """Train the tokenizer of a model without one on ``texts`` and leave it in ``kept``, so that a resume has the same.

    Called by one rank. Raises ForeignFiles.
    """
    if options.model is not None or ((kept / "tokenizer.json").exists() and not fresh):
        return
    with written_by_library(kept) as private:
        _trained(texts, options.vocab_size, options.max_length).save_pretrained(private)


def load_model(options: Options, tokenizer: Any, classes: Sequence[str]) -> Any:
    """A model that gives a logit for each class. Raises UsageError for one that cannot be had."""
    names = dict(enumerate(classes))
    labels: dict[str, Any] = {"id2label": names, "label2id": {name: number for number, name in names.items()}}
    if options.model is not None:
        make = transformers.AutoModelForSequenceClassification.from_pretrained
        # A head for other classes is replaced: that is what fine-tuning is for.
        how = {"num_labels": len(classes), "ignore_mismatched_sizes": True, **labels}
        return pretrained.load("model", options.model, make, GIVE, **how)
    config = transformers.XLMRobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=options.hidden_size,
        num_hidden_layers=options.num_hidden_layers,
        num_attention_heads=options.hidden_size // _HEAD_WIDTH,
        intermediate_size=4 * options.hidden_size,
        max_position_embeddings=options.max_length + 2,  # XLM-R's positions begin behind the padding's number
        num_labels=len(classes),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        type_vocab_size=1,
        **labels,
    )
    return transformers.XLMRobertaForSequenceClassification(config)


def _trained(texts: Sequence[str], vocab_size: int, max_length: int) -> Any:
    """A SentencePiece tokenizer of the texts, in the form that XLM-R's has.

    Its pieces are found by BPE, not by XLM-R's Unigram, whose training gives slightly different scores each time.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")])
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(_SPECIAL), show_progress=False)
    made.train_from_iterator(texts, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[(token, _SPECIAL.index(token)) for token in ("<s>", "</s>")]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>",
        eos_token="</s>",
        cls_token="<s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
        model_max_length=max_length,
    )


def whole_mask(mask: torch.Tensor) -> torch.Tensor:
    """[batch, width] of 0 and 1 as [batch, 1, width, width] of false and true, without taking more memory.

    Given the former, transformers asks the device in every forward whether anything is padded at all
    (``padding_mask.all()``), and the host waits for the answer. The latter is taken as it is.
    """
    return mask.bool()[:, None, None, :].expand(-1, -1, mask.shape[1], -1)


def takes_whole_masks(model: Any, pad_id: int) -> bool:
    """Whether a model says the same of a padded text under either mask; tried out, since each has its own code."""
    device = next(model.parameters()).device
    ids = torch.arange(16, device=device).view(2, 8) % model.config.vocab_size
    ids = torch.where(ids == pad_id, (pad_id + 1) % model.config.vocab_size, ids)
    mask = torch.ones_like(ids)
    ids[1, 5:], mask[1, 5:] = pad_id, 0
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            plain, other = (model(input_ids=ids, attention_mask=given).logits for given in (mask, whole_mask(mask)))
        return bool(torch.allclose(plain.float(), other.float(), rtol=1e-3, atol=1e-4))
    except Exception:  # whatever a model says to a mask that it does not know
        return False
    finally:
        model.train(training)


def remember_structure(model: torch.nn.Module) -> None:
    """Let a model whose modules and parameters stay the ones they are answer from memory.

    Hugging Face's Trainer walks through all modules several times in each step: for ``train()``, ``zero_grad()`` and
    ``parameters()``. For a network of BERT-base's depth that is milliseconds of Python.
    """
    parameters = list(model.parameters())
    walk, switch = model.parameters, model.train

    def known_parameters(recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        return iter(parameters) if recurse else walk(recurse=False)

    def zero_grad(set_to_none: bool = True) -> None:
        for parameter in parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()

    def train(mode: bool = True) -> Any:
        return model if model.training is mode else switch(mode)

    model.parameters = known_parameters  # type: ignore[method-assign]
    model.zero_grad = zero_grad  # type: ignore[method-assign]
    model.train = train  # type: ignore[method-assign]
    model.train(not model.training).train(not model.training)  # every module is in one mode from here on
