"""visobert: BERT-base on short text, batch 512 in length buckets, bf16, against guide 4's settings (96, 2 workers)."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from fulltilt.errors import StoppedEarly
from fulltilt.feed.text import Tokens
from fulltilt.recipes.made import text as made
from fulltilt.recipes.recipe import Request
from fulltilt.recipes.visobert import RECIPE, Options
from fulltilt.recipes.visobert.batches import TokenisedTexts
from fulltilt.recipes.visobert.model import load_model, load_tokenizer
from fulltilt.recipes.visobert.texts import Texts, read_texts
from fulltilt.recipes.visobert.trainer import ClassLoss
from fulltilt.recipes.visobert.training import Fitting
from fulltilt.records import Sample
from fulltilt.train import TrainSettings, checkpoint
from fulltilt.train.progress import Silence
from fulltilt.train.stop import StopRequest
from recipebench.measuring import Bench, drain, mean_of, plain_step, rate, sampling, stock_rate

# XLM-R base with ViSoBERT's vocabulary.
BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
VOCABULARY = 15_004
GUIDE_BATCH, GUIDE_WORKERS, GUIDE_PREFETCH = 96, 2, 4
WARMUP_STEPS = 20


def run(bench: Bench) -> None:
    """Compute-only, fed, compute-only again, then the guide's settings and ours with the guide's batch."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    batch = 16 if bench.smoke else 512
    data, options = prepared(bench)
    texts = read_texts(data, options, 0)
    bench.note("promised", "1.2 to 1.3")
    fitting = fitted(bench, data, options, texts, batch)
    before = compute_rate(bench, fitting)
    bench.note("compute_only", before)
    fed, used, active = trainer_rate(fitting, bench.seconds(8))
    bench.note("gpu_util_pct", used)
    bench.note("sm_active_pct", active)
    bench.note("fed", fed)
    bench.note("compute_only", (before + compute_rate(bench, fitting)) / 2)
    bench.note("guide", guide_rate(bench, fitting, texts))
    bench.remark("guide 4's 8-bit AdamW is left out on both sides: fused AdamW is at least as fast")
    if bench.left_s() > 15 or bench.smoke:
        small = fitted(bench, data, options, texts, 8 if bench.smoke else GUIDE_BATCH)
        bench.note("fed_at_guide_batch", trainer_rate(small, bench.seconds(5))[0])


def prepared(bench: Bench) -> tuple[Path, Options]:
    """Made texts, and a model folder of the full size with random weights."""
    data, model = bench.work / "data", bench.work / "model"
    data.mkdir()
    for _ in made.make(data, 400 if bench.smoke else 60_000, 0):
        pass
    options = Options()
    tokenizer = load_tokenizer(options, read_texts(data, options, 0).train.texts, model)
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
    return Fitting(Request(options, settings, data, out), texts, Silence(out), StopRequest())


def trainer_rate(fitting: Fitting, seconds: float) -> tuple[float, float | None, float | None]:
    """Samples per second of the Trainer after its first steps, and mean GPU use and SM activity meanwhile (%)."""
    samples: list[Sample] = []
    meter = Meter(fitting, seconds, samples)
    fitting.trainer.add_callback(meter)
    with sampling(samples):
        try:
            fitting.fit(None)
        except StoppedEarly:
            pass
    gpus = [sample.gpus[0] for sample in samples if sample.gpus]
    return (
        meter.samples / meter.wall_s,
        mean_of([gpu.util_pct for gpu in gpus]),
        mean_of([gpu.sm_active_pct for gpu in gpus]),
    )


class Meter(transformers.TrainerCallback):
    """Counts samples between two moments at which the device has done everything."""

    def __init__(self, fitting: Fitting, seconds: float, readings: list[Sample]) -> None:
        self.fitting, self.seconds, self.readings = fitting, seconds, readings
        self.samples, self.wall_s = 0, 0.0
        self._began_s: float | None = None
        self._served = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """See TrainerCallback."""
        sampler = self.fitting.sampler
        assert sampler is not None
        if self._began_s is None:
            if state.global_step >= WARMUP_STEPS:
                drain(args.device)
                self._began_s, self._served = time.perf_counter(), sampler.served
                self.readings.clear()
        elif time.perf_counter() - self._began_s >= self.seconds:
            drain(args.device)
            self.wall_s = time.perf_counter() - self._began_s
            self.samples = sampler.served - self._served
            raise StoppedEarly("enough")


def compute_rate(bench: Bench, fitting: Fitting) -> float:
    """The plain step on the very batches that the recipe serves, made beforehand."""
    assert fitting.sampler is not None
    model = load_model(fitting.options, fitting.tokenizer, ("a", "b", "c")).to(bench.device).train()
    numbers = itertools.islice(fitting.sampler.batching.batches(fitting.sampler.lengths, 0), 64)
    texts = fitting.trainer.train_dataset.texts
    batches = itertools.cycle([texts.batch(picks) for picks in numbers])
    dtype = torch.bfloat16 if bench.device.type == "cuda" else None
    step = plain_step(model, partial(loss, ClassLoss(None, 0.0)), lr=2e-5, clip_norm=1.0, dtype=dtype)

    def once() -> int:
        batch = next(batches)
        step(batch)
        return len(batch["labels"])

    return rate(once, bench.seconds(6), bench.device, warmup=10)


def guide_rate(bench: Bench, fitting: Fitting, texts: Texts) -> float:
    """Guide 4's settings: a stock loader in random order, padded to the longest of each batch of 96, fp16."""
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
