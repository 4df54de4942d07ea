"""visobert: BERT-base on short text, batch 512 in length buckets, bf16, against the usual settings (96, 2 workers)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from feedbench.measuring import plain_step, stock_loader

from fulltilt.feed.text import tokenise
from fulltilt.recipes.pretrained import trained_tokenizer
from fulltilt.recipes.recipe import Request
from fulltilt.recipes.synthetic import text as made
from fulltilt.recipes.visobert import RECIPE, VisobertOptions
from fulltilt.recipes.visobert.data import Split, Texts, read_texts
from fulltilt.recipes.visobert.trainer import build, load_model
from fulltilt.train import Job, TrainSettings
from recipebench.measuring import Bench, stock_rate
from recipebench.turns import Turns, engine_turns

# XLM-R base with ViSoBERT's vocabulary.
BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
VOCABULARY = 15_004
STOCK_BATCH, STOCK_WORKERS, STOCK_PREFETCH = 96, 2, 4
# More than the steps of a turn.
REMEMBERED = 400
# The made texts so many times over: an epoch of several hundred steps.
AGAIN = 4


def run(bench: Bench) -> None:
    """Fed and compute-only in turns, then the usual settings and ours with their batch."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    batch = 16 if bench.smoke else 512
    data, options = prepared(bench)
    texts = read_texts(data, options, 0)
    longer = replace(texts, train=Split(texts.train.texts * AGAIN, texts.train.labels * AGAIN))
    bench.note(promised="1.2 to 1.3")
    job, settings, tokenizer = engine_job(bench, data, options, longer, batch)
    served = Remembering(job.data)
    turns = Turns(compute_steps(bench, options, tokenizer, job, served), bench)
    bench.note(**engine_turns(replace(job, data=served), settings, bench.work / "fed", turns))
    bench.note(stock=usual_rate(bench, options, tokenizer, job, texts))
    bench.remark("the usual 8-bit AdamW is left out on both sides: fused AdamW is at least as fast")
    if bench.left_s() > bench.another_s:
        job, settings, _ = engine_job(bench, data, options, longer, 8 if bench.smoke else STOCK_BATCH)
        alone = Turns(None, bench, turn_s=4, turns=1)
        bench.note(fed_at_stock_batch=engine_turns(job, settings, bench.work / "small", alone)["fed"])


def prepared(bench: Bench) -> tuple[Path, VisobertOptions]:
    """Made texts, and a model folder of the full size with random weights."""
    data, model = bench.work / "data", bench.work / "pretrained"
    data.mkdir()
    for _ in made.make(data, 400 if bench.smoke else 60_000, 0):
        pass
    options = VisobertOptions()
    texts = read_texts(data, options, 0).train.texts
    tokenizer = trained_tokenizer(texts, size=options.vocab_size, start="<s>", pad="<pad>", end="</s>")
    tokenizer.save_pretrained(model)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1} if bench.smoke else BASE
    config = transformers.XLMRobertaConfig(
        vocab_size=max(VOCABULARY, len(tokenizer)), max_position_embeddings=514, type_vocab_size=1, **sizes
    )
    transformers.XLMRobertaForSequenceClassification(config).save_pretrained(model)
    return data, replace(options, model=str(model))


def engine_job(
    bench: Bench, data: Path, options: VisobertOptions, texts: Texts, batch: int
) -> tuple[Job, TrainSettings, Any]:
    """The recipe's job without evaluation, its settings, and its tokenizer."""
    changed = {"epochs": 1000, "batch_size": batch, "lr": 2e-5, "monitor": None, "drop_last": True}
    settings = TrainSettings(**{**RECIPE.settings, **changed, "device": bench.device.type})
    job, tokenizer = build(Request(options, settings, data, bench.work / f"out-{batch}"), texts)
    return replace(job, eval_data=None, eval_metrics=None), settings, tokenizer


class Remembering:
    """The recipe's loader, with the batches that it served last: widths differ, and both sides need the same."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.begin_at = loader.begin_at
        self.last: deque[Any] = deque(maxlen=REMEMBERED)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            self.last.append(batch)
            yield batch


def compute_steps(
    bench: Bench, options: VisobertOptions, tokenizer: Any, job: Job, served: Remembering
) -> Callable[[int], int]:
    """The plain step on the very batches of the fed steps before, with the recipe's own loss."""
    model = bench.trained(load_model(options, tokenizer, ("a", "b", "c")))
    step = plain_step(model, _on(job.loss, bench), lr=2e-5, clip_norm=1.0)

    def several(count: int) -> int:
        batches = list(served.last)[-count:]
        for batch in batches:
            step(batch)
        return sum(len(batch["labels"]) for batch in batches)

    for _, _ in zip(range(8), served, strict=False):
        pass
    several(8)
    return several


def usual_rate(bench: Bench, options: VisobertOptions, tokenizer: Any, job: Job, texts: Texts) -> float:
    """The usual settings: a stock loader in random order, padded to the longest of each batch of 96, fp16."""
    batch, workers = (8, 1) if bench.smoke else (STOCK_BATCH, STOCK_WORKERS)
    tokens = tokenise(texts.train.texts, lambda part: tokenizer(part, truncation=True, max_length=options.max_length))
    each = zip(tokens.flat.tensor_split(tokens.offsets[1:-1]), texts.train.labels, strict=True)
    samples: Any = [{"input_ids": ids.tolist(), "labels": label} for ids, label in each]
    pad = transformers.DataCollatorWithPadding(tokenizer)
    names = ("input_ids", "attention_mask", "labels")

    def collate(samples: list[Any]) -> tuple[torch.Tensor, ...]:
        padded = pad(samples)
        return tuple(padded[name] for name in names)

    how = {"collate_fn": collate, "prefetch_factor": STOCK_PREFETCH, "multiprocessing_context": "fork"}
    loader = stock_loader(samples, batch, workers, bench.device, **how)
    model = load_model(options, tokenizer, texts.classes).to(bench.device).train()
    loss = _on(job.loss, bench)

    def from_parts(net: Any, parts: Any) -> torch.Tensor:
        found: torch.Tensor = loss(net, dict(zip(names, parts, strict=True)))
        return found

    step = plain_step(model, from_parts, lr=2e-5, clip_norm=1.0, dtype=torch.float16)
    return stock_rate(bench, loader, step, batch, 10)


def _on(loss: Any, bench: Bench) -> Any:
    return loss.to(bench.device)
