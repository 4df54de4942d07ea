"""Short text through BERT-base: length buckets against padding to 128 and dynamic padding."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from feedbench.measuring import Bench, on_device, stock_loader, trainer
from fulltilt import feed

Sample = tuple[list[int], int]


class Texts(Dataset[Any]):
    """Token ids and a label."""

    def __init__(self, sequences: list[list[int]]) -> None:
        self.sequences = sequences

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> Sample:
        return self.sequences[index], index % 2


def pad_to(length: int | None) -> Callable[[list[Sample]], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """A collate function that pads to ``length``, or to the longest of the batch."""

    def collate(samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        width = length or max(len(ids) for ids, _ in samples)
        ids = torch.zeros(len(samples), width, dtype=torch.int64)
        for row, (sequence, _) in enumerate(samples):
            ids[row, : len(sequence)] = torch.tensor(sequence)
        return ids, (ids != 0).long(), torch.tensor([label for _, label in samples])

    return collate


def run_text(bench: Bench) -> None:
    """BERT-base, batch 512, mean length 21."""
    from transformers import BertConfig, BertForSequenceClassification

    batch_size, count = (8, 100) if bench.smoke else (512, 40_960)
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(**(small if bench.smoke else {}))).to(bench.device)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.exp(torch.randn(count, generator=generator) * 0.55 + 2.9).round().clamp(4, 128).int().tolist()
    flat = torch.randint(5, 30_000, (sum(lengths),), generator=generator)
    sequences = [part.tolist() for part in torch.split(flat, lengths)]
    bench.note("text", "mean_tokens", sum(lengths) / count)
    step = trainer(model, lambda network, batch: network(**batch).loss)

    def size(batch: Any) -> int:
        return len(batch["labels"])

    labels = [number % 2 for number in range(count)]
    loader = feed.text(sequences, labels, batch_size=batch_size, device=bench.device, drop_last=True)
    ready = list(loader)  # epoch 0, already assembled: what the steps alone cost
    for batch in ready * (1 if bench.smoke else 2):  # the widths that come often are recorded
        step(batch)
    compute, fed = [], []
    for _ in range(2 if bench.smoke else 4):  # the very same batches, whole epochs in turn
        compute.append(bench.epoch_rate(step, ready, size))
        loader.set_epoch(0)
        fed.append(bench.epoch_rate(step, loader, size))
    ready = []
    bench.note("text", "compute_only", statistics.median(compute))
    bench.note("text", "compute_only_runs", [round(rate, 1) for rate in compute])
    bench.note("text", "feed_buckets", statistics.median(fed))
    bench.note("text", "feed_buckets_runs", [round(rate, 1) for rate in fed])
    ratios = [ours / alone for ours, alone in zip(fed, compute, strict=True)]
    bench.note("text", "fed_over_compute", statistics.median(ratios))
    bench.note("text", "padding_waste_buckets", loader.padding_waste)
    order = torch.split(torch.randperm(count, generator=generator), batch_size)
    dynamic = sum(len(batch) * max(lengths[i] for i in batch.tolist()) for batch in order)
    bench.note("text", "padding_waste_dynamic", 1 - sum(lengths) / dynamic)
    bench.note("text", "padding_waste_pad_to_128", 1 - sum(lengths) / (128 * count))
    for name, width in (("pad_to_128", 128), ("dynamic_padding", None)):
        if not bench.has_time_for(12):
            bench.note("text", name, "no time left")
            continue
        workers = 1 if bench.smoke else 4
        stock = stock_loader(Texts(sequences), batch_size, workers, bench.device, collate_fn=pad_to(width))

        def batches(stock: DataLoader[Any] = stock) -> Iterator[Any]:
            for parts in on_device(stock, bench.device):
                yield dict(zip(("input_ids", "attention_mask", "labels"), parts, strict=True))

        rate, _ = bench.rate(step, batches, size, 6, workers=workers)
        bench.note("text", name, rate)
        bench.note("text", f"fed_over_{name}", statistics.median(fed) / rate)
        del stock
