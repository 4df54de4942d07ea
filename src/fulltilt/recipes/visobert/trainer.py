"""The visobert recipe as a Job: tokenizer, model, loss and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers
from torch.nn import functional

from fulltilt import feed
from fulltilt.feed.text import Tokens, tokenise
from fulltilt.recipes import pretrained
from fulltilt.recipes.out_folder import refuse_foreign, written_by_library
from fulltilt.recipes.recipe import Request, say
from fulltilt.recipes.visobert import VisobertOptions
from fulltilt.recipes.visobert.data import Split, Texts, read_texts
from fulltilt.train import checkpoint
from fulltilt.train.distributed import device_of, rank_from_env
from fulltilt.train.job import Job

GIVE = "Give the folder of a model, or its name on the hub if this machine can reach it."
# Batches are padded to a multiple of it.
WIDTH_MULTIPLE = 8
_HEAD_WIDTH = 32


def check_options(request: Request) -> None:
    """Check the model's name. Raises UsageError."""
    options: VisobertOptions = request.options
    if options.model is not None:
        pretrained.check_model(options.model, request.out, GIVE)


def run(request: Request) -> Mapping[str, float]:
    """Train and return the last metrics; the model is saved in ``OUT/model``. Raises FulltiltErrors."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    request = on_this_machine(request)
    refuse_foreign(request.out / "model")  # before the training
    texts = read_texts(request.data, request.options, request.settings.seed)
    job, tokenizer = build(request, texts)
    metrics = request.train(job)
    if rank_from_env().rank == 0:
        keep_model(request, job.model, tokenizer)
    return metrics


def on_this_machine(request: Request) -> Request:
    """The request with the warm-up in epochs or steps, and on a CPU without fp16 and 8-bit AdamW."""
    options: VisobertOptions = request.options
    settings = request.settings
    if options.warmup_ratio and settings.max_steps is not None:
        settings = replace(settings, warmup_steps=round(options.warmup_ratio * settings.max_steps))
    elif options.warmup_ratio:
        settings = replace(settings, warmup_epochs=options.warmup_ratio * settings.epochs)
    if device_of(settings.device, rank_from_env().local_rank).type == "cpu":
        if settings.precision == "fp16":
            say("No GPU here: fp16 switched off, the arithmetic is float32")
            settings = replace(settings, precision="fp32")
        if settings.optimizer == "adamw8bit":
            say("No GPU here: 8-bit AdamW switched off (it saves GPU memory), the optimizer is AdamW")
            settings = replace(settings, optimizer="adamw")
    return replace(request, settings=settings)


def build(request: Request, texts: Texts) -> tuple[Job, Any]:
    """The Job of a request, and the tokenizer."""
    options: VisobertOptions = request.options
    settings = request.settings
    tokenizer = load_tokenizer(request, texts)
    torch.manual_seed(settings.seed)  # the weights are made before the engine seeds
    model = load_model(options, tokenizer, texts.classes)
    weights = torch.tensor(texts.balanced_weights()) if options.class_weights == "balanced" else None
    loss = ClassLoss(weights, options.label_smoothing_factor)
    loss.whole_masks = takes_whole_masks(model, tokenizer.pad_token_id)
    cut = partial(tokenizer, truncation=True, max_length=options.max_length)
    data, held = (
        _data(request, split, tokenise(split.texts, cut), tokenizer.pad_token_id, training=training)
        for split, training in ((texts.train, True), (texts.validation, False))
    )
    say(
        f"{len(texts.train.texts):,} training and {len(texts.validation.texts):,} validation texts, "
        f"{len(texts.classes)} classes; {sum(p.numel() for p in model.parameters()):,} parameters"
    )
    job = Job(
        model=model,
        loss=loss,
        data=data,
        eval_data=held,
        eval_loss=loss.with_predictions,
        eval_metrics=lambda kept: classification(kept["predicted"], kept["labels"], len(texts.classes)),
        name="visobert",
    )
    return job, tokenizer


def _data(request: Request, split: Split, tokens: Tokens, pad_id: int, *, training: bool) -> Any:
    """The loader of one split."""
    settings, info = request.settings, rank_from_env()
    labels, size = split.labels, settings.batch_size
    budget = request.options.tokens_per_batch if training else None
    if not training:  # by length, divided among the ranks: every text counts once
        size = settings.eval_batch_size or size
        mine = tokens.lengths.argsort(stable=True)[info.rank :: info.world_size].tolist()
        each = tokens.flat.tensor_split(tokens.offsets[1:-1])
        tokens, labels = Tokens.of([each[n].tolist() for n in mine]), [labels[n] for n in mine]
    return feed.text(
        tokens,
        labels,
        batch_size=None if budget else max(size // info.world_size, 1),
        tokens_per_batch=budget,
        pad_id=pad_id,
        multiple=WIDTH_MULTIPLE,
        shuffle=training,
        drop_last=training and settings.drop_last,
        seed=settings.seed,
        device=device_of(settings.device, info.local_rank),
        rank=info.rank if training else 0,
        world_size=info.world_size if training else 1,
    )


def keep_model(request: Request, model: Any, tokenizer: Any) -> None:
    """Save the last or the best weights with their tokenizer in ``OUT/model``."""
    final, saved = request.out / "model", checkpoint.described(request.out / "checkpoints")
    best = checkpoint.best_first(saved, request.settings.monitor_mode) if request.options.load_best_model_at_end else []
    weights = pretrained.evaluated_weights([*best, *saved][0].folder)
    with written_by_library(final) as private:
        model.save_pretrained(private, state_dict=weights)
        tokenizer.save_pretrained(private)
    say(f"The {'best' if best else 'last'} model is in {final}")


# --------------------------------------------------------------------------- model and tokenizer


def load_tokenizer(request: Request, texts: Texts) -> Any:
    """The tokenizer of the model, or a new one trained on the texts."""
    options: VisobertOptions = request.options
    if options.model is not None:
        return pretrained.load("tokenizer", options.model, transformers.AutoTokenizer.from_pretrained, GIVE)
    # XLM-R's special tokens, whose ids are fixed in its configuration.
    special = {"start": "<s>", "pad": "<pad>", "end": "</s>"}
    return pretrained.own_tokenizer(request, texts.train.texts, size=options.vocab_size, **special)


def load_model(options: VisobertOptions, tokenizer: Any, classes: tuple[str, ...]) -> Any:
    """A model with a logit per class. Raises UsageError for one that cannot be loaded."""
    names = dict(enumerate(classes))
    labels: dict[str, Any] = {"id2label": names, "label2id": {name: number for number, name in names.items()}}
    if options.model is not None:
        make = transformers.AutoModelForSequenceClassification.from_pretrained
        # A head for other classes is replaced.
        how = {"num_labels": len(classes), "ignore_mismatched_sizes": True, **labels}
        return pretrained.load("model", options.model, make, GIVE, **how).float()
    config = transformers.XLMRobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=options.hidden_size,
        num_hidden_layers=options.num_hidden_layers,
        num_attention_heads=options.hidden_size // _HEAD_WIDTH,
        intermediate_size=4 * options.hidden_size,
        max_position_embeddings=options.max_length + 2,  # XLM-R's positions begin after the padding id
        num_labels=len(classes),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        type_vocab_size=1,
        **labels,
    )
    return transformers.XLMRobertaForSequenceClassification(config)


def whole_mask(mask: torch.Tensor) -> torch.Tensor:
    """A mask [batch, width] of 0 and 1 as a boolean view [batch, 1, width, width].

    For the former transformers calls ``padding_mask.all()`` in every forward, and the host waits for the GPU.
    """
    return mask.bool()[:, None, None, :].expand(-1, -1, mask.shape[1], -1)


def takes_whole_masks(model: Any, pad_id: int) -> bool:
    """Whether a model gives the same logits under either mask; tried out, since models differ."""
    ids = torch.arange(16).view(2, 8) % model.config.vocab_size
    ids = torch.where(ids == pad_id, (pad_id + 1) % model.config.vocab_size, ids)
    mask = torch.ones_like(ids)
    ids[1, 5:], mask[1, 5:] = pad_id, 0
    model.eval()  # undone by the engine
    try:
        with torch.no_grad():
            plain, other = (model(input_ids=ids, attention_mask=given).logits for given in (mask, whole_mask(mask)))
        return bool(torch.allclose(plain, other, rtol=1e-3, atol=1e-4))
    except Exception:  # the model does not take such a mask
        return False


# --------------------------------------------------------------------------- loss and metrics


class ClassLoss(torch.nn.Module):
    """Cross-entropy with class weights and label smoothing. ``whole_masks``: the model takes ``whole_mask``."""

    def __init__(self, weights: torch.Tensor | None, smoothing: float) -> None:
        super().__init__()
        self.register_buffer("weights", weights, persistent=False)
        self.smoothing = smoothing
        self.whole_masks = False

    def forward(self, model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The mean loss of a batch."""
        return self._measured(self._logits(model, batch), batch["labels"])

    def with_predictions(
        self, model: Any, batch: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, Any], dict[str, torch.Tensor]]:
        """The loss, and what the metrics of the whole set need."""
        logits = self._logits(model, batch)
        kept = {"predicted": logits.argmax(-1), "labels": batch["labels"]}
        return self._measured(logits, batch["labels"]), {}, kept

    def _logits(self, model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        mask = batch["attention_mask"]
        found = model(input_ids=batch["input_ids"], attention_mask=whole_mask(mask) if self.whole_masks else mask)
        logits: torch.Tensor = found.logits.float()
        return logits

    def _measured(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        weights: Any = self.weights
        summed = functional.cross_entropy(
            logits, labels, weight=weights, label_smoothing=self.smoothing, reduction="sum"
        )
        return summed / len(labels)


def classification(predicted: torch.Tensor, true: torch.Tensor, classes: int) -> dict[str, float]:
    """``macro_f1``, the mean F1 over the classes that occur, and ``accuracy``."""
    table = torch.bincount(true * classes + predicted, minlength=classes * classes).view(classes, classes).double()
    hits, asked, given = table.diagonal(), table.sum(1), table.sum(0)
    occurs = asked + given > 0
    f1 = 2 * hits[occurs] / (asked + given)[occurs]
    return {"macro_f1": float(f1.mean()), "accuracy": float(hits.sum() / table.sum())}
