"""The model and its tokenizer: from a folder or the hub, or a small XLM-R that needs no download."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulltilt.recipes import pretrained
from fulltilt.recipes.run_folder import written_by_library
from fulltilt.recipes.visobert.arguments import GIVE, require_transformers

if TYPE_CHECKING:
    from fulltilt.recipes.visobert import Options

_HEAD_WIDTH = 32
# XLM-R's own, in its own order: the ids 0 to 3 are fixed in its configuration.
_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


def load_tokenizer(options: Options, kept: Path) -> Any:
    """The tokenizer of the model, or the one that ``keep_tokenizer`` has left in ``kept``."""
    transformers = require_transformers()
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
    transformers = require_transformers()
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
    return require_transformers().PreTrainedTokenizerFast(
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
