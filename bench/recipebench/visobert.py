"""visobert: BERT-base on short text, batch 512 in length buckets, bf16, against the usual settings (96, 2 workers)."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from fulltilt.errors import StoppedEarly
from fulltilt.feed.text import Tokens
from fulltilt.recipes.recipe import Request
from fulltilt.recipes.synthetic import text as made
from fulltilt.recipes.visobert import RECIPE, Options
from fulltilt.recipes.visobert.data import Split, Texts, TokenisedTexts, read_texts
from fulltilt.recipes.visobert.model import keep_tokenizer, load_model, load_tokenizer, whole_mask
from fulltilt.recipes.visobert.trainer import ClassLoss
from fulltilt.recipes.visobert.training import Fitting
from fulltilt.train import TrainSettings, checkpoint
from fulltilt.train.progress import Screen
from fulltilt.train.stop import StopRequest
from recipebench.measuring import Bench, plain_step, sampling, stock_rate
from recipebench.turns import Turns

# XLM-R base with ViSoBERT's vocabulary.
BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
VOCABULARY = 15_004
GUIDE_BATCH, GUIDE_WORKERS, GUIDE_PREFETCH = 96, 2, 4
WARMUP_STEPS = 20
# More than the steps of a turn.
REMEMBERED = 400
# The made texts so many times over: an epoch of several hundred steps.
AGAIN = 4


def run(bench: Bench) -> None:
    """Fed and compute-only in turns, then the guide's settings and ours with the guide's batch."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    batch = 16 if bench.smoke else 512
    data, options = prepared(bench)
    texts = read_texts(data, options, 0)
    again = 1 if bench.smoke else AGAIN
    longer = replace(texts, train=Split(texts.train.texts * again, texts.train.labels * again))
    bench.note("promised", "1.2 to 1.3")
    fitting = fitted(bench, data, options, longer, batch)
    bench.begins("compute-only steps")
    served = remembering(fitting)
    turns = Turns(compute_steps(bench, fitting, served), bench)
    bench.begins("fed and compute-only steps in turns")
    bench.note_all(trainer_turns(fitting, turns))
    bench.begins("the guide's settings")
    bench.note("guide", guide_rate(bench, fitting, texts))
    bench.remark("the usual 8-bit AdamW is left out on both sides: fused AdamW is at least as fast")
    if bench.left_s() > bench.another_s:
        bench.begins("ours at the guide's batch")
        small = fitted(bench, data, options, texts, 8 if bench.smoke else GUIDE_BATCH)
        alone = Turns(None, bench, turn_s=4, turns=1)
        bench.note("fed_at_guide_batch", trainer_turns(small, alone)["fed"])


def prepared(bench: Bench) -> tuple[Path, Options]:
    """Made texts, and a model folder of the full size with random weights."""
    data, model = bench.work / "data", bench.work / "pretrained" / "model"
    data.mkdir()
    for _ in made.make(data, 400 if bench.smoke else 60_000, 0):
        pass
    options = Options()
    keep_tokenizer(options, read_texts(data, options, 0).train.texts, model, fresh=True)
    tokenizer = load_tokenizer(options, model)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1} if bench.smoke else BASE
    config = transformers.XLMRobertaConfig(
        vocab_size=max(VOCABULARY, len(tokenizer)), max_position_embeddings=514, type_vocab_size=1, **sizes
    )
    transformers.XLMRobertaForSequenceClassification(config).save_pretrained(model)
    return data, replace(options, model=str(model))


def fitted(bench: Bench, data: Path, options: Options, texts: Texts, batch: int) -> Fitting:
    """The recipe, ready to train, in a run folder of its own."""
    settings = TrainSettings(
        **{
            **RECIPE.settings,
            "epochs": 1000,
            "batch_size": batch,
            "lr": 2e-5,
            "device": bench.device.type,
            "precision": "auto",
        }
    )
    out = bench.work / f"fed-{batch}"
    checkpoint.prepare(out / "checkpoints")
    return Fitting(Request(options, settings, data, out), texts, Screen(out, speaks=False), StopRequest())


def trainer_turns(fitting: Fitting, turns: Turns) -> dict[str, Any]:
    """The figures of the Trainer, once its first steps are behind it."""
    fitting.trainer.add_callback(Meter(fitting, turns))
    with sampling(turns.readings), contextlib.suppress(StoppedEarly):
        fitting.fit(None)
    return turns.figures()


class Meter(transformers.TrainerCallback):  # type: ignore[misc]
    """Tells the turns of every step."""

    def __init__(self, fitting: Fitting, turns: Turns) -> None:
        self.fitting, self.turns = fitting, turns

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """See TrainerCallback."""
        assert self.fitting.sampler is not None
        if state.global_step >= WARMUP_STEPS:
            self.turns.fed_step((state.global_step - 1) // self.fitting.per_epoch, self.fitting.sampler.served)


def remembering(fitting: Fitting) -> deque[Any]:
    """The batches that the recipe has served last, kept as they were: widths differ, and both sides need the same."""
    served: deque[Any] = deque(maxlen=REMEMBERED)
    texts = fitting.trainer.train_dataset
    assemble = texts.__getitems__

    def remembered(picks: Any) -> Any:
        served.append(assemble(picks))
        return dict(served[-1])

    texts.__getitems__ = remembered
    return served


def compute_steps(bench: Bench, fitting: Fitting, served: deque[Any]) -> Callable[[int], int]:
    """The plain step on the very batches of the fed steps before, with the mask that the recipe gives."""
    model = bench.trained(load_model(fitting.options, fitting.tokenizer, ("a", "b", "c")))
    dtype = torch.bfloat16 if bench.device.type == "cuda" else None
    step = plain_step(model, partial(loss, ClassLoss(None, 0.0)), lr=2e-5, clip_norm=1.0, dtype=dtype)

    def several(count: int) -> int:
        batches = list(served)[-count:]
        for batch in batches:
            step({**batch, "attention_mask": whole_mask(batch["attention_mask"])})
        return sum(len(batch["labels"]) for batch in batches)

    first = fitting.trainer.train_dataset.__getitems__
    assert fitting.sampler is not None
    for picks in itertools.islice(fitting.sampler, 8):
        first(picks)
    several(8)
    return several


def guide_rate(bench: Bench, fitting: Fitting, texts: Texts) -> float:
    """The usual settings: a stock loader in random order, padded to the longest of each batch of 96, fp16."""
    batch, workers = (8, 1) if bench.smoke else (GUIDE_BATCH, GUIDE_WORKERS)
    tokens: Tokens = fitting._tokens(texts.train)
    pad = transformers.DataCollatorWithPadding(fitting.tokenizer)

    def collate(samples: list[Any]) -> tuple[torch.Tensor, ...]:
        padded = pad(samples)
        return padded["input_ids"], padded["attention_mask"], padded["labels"]

    loader = torch.utils.data.DataLoader(
        TokenisedTexts(tokens, texts.train.labels),
        batch_size=batch,
        shuffle=True,
        drop_last=True,
        collate_fn=collate,
        num_workers=workers,
        prefetch_factor=GUIDE_PREFETCH,
        pin_memory=bench.device.type == "cuda",
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    model = load_model(fitting.options, fitting.tokenizer, texts.classes).to(bench.device).train()
    dtype = torch.float16 if bench.device.type == "cuda" else None
    classified = partial(loss, ClassLoss(None, 0.0))

    def from_parts(net: Any, parts: Any) -> torch.Tensor:
        return classified(net, dict(zip(("input_ids", "attention_mask", "labels"), parts, strict=True)))

    step = plain_step(model, from_parts, lr=2e-5, clip_norm=1.0, dtype=dtype)
    return stock_rate(loader, step, batch, bench.seconds(10), bench.device)


def loss(compute: ClassLoss, model: Any, batch: Any) -> torch.Tensor:
    """The recipe's loss on a batch."""
    outputs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    return compute(outputs, batch["labels"])
