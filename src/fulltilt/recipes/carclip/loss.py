"""The contrastive loss: every image against every caption of the step, over all micro-batches and all ranks.

Plain gradient accumulation would compare the samples of a micro-batch only with each other: fewer negatives, another
loss. Here a step is embedded part by part, compared as a whole, and each part is computed again in backward when its
turn comes (GradCache, Gao et al. 2021). The gradient is that of one large batch, the memory that of one part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fulltilt.train.data_source import counts_of_all, rows_of_all
from fulltilt.train.guards import is_out_of_memory

# CLIP's own bound: beyond a scale of 100 the softmax is so sharp that training becomes unstable.
MOST_LOG_SCALE = math.log(100.0)

Batch = Mapping[str, torch.Tensor]


def contrastive_loss(model: Any, parts: Sequence[Batch]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The symmetric InfoNCE loss over the parts of all ranks, and how many pairs it finds (``matched``).

    Each rank knows all embeddings and differentiates the whole loss with respect to its own, so that no gradient has
    to travel between ranks but those of the weights.
    """
    counts, own = _embedded_on_all_ranks(model, parts)
    cars = torch.cat([part["car"] for part in parts])
    images, texts = own
    if len(counts) > 1:
        # The engine weighs a rank's loss by its share of the samples. That is right for the temperature, which every
        # rank sees the whole loss of, but the gradient of its own embeddings is complete as it is.
        for embedded in own:
            if embedded.requires_grad:
                embedded.register_hook(_scaled_by(sum(counts) / len(cars)))  # type: ignore[no-untyped-call, unused-ignore]
        images, texts, cars = (rows_of_all(rows, counts) for rows in (images, texts, cars))
    with torch.no_grad():
        model.log_scale.clamp_(0.0, MOST_LOG_SCALE)
    return compared(images, texts, cars, model.log_scale)


def compared(
    images: torch.Tensor, texts: torch.Tensor, cars: torch.Tensor, log_scale: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of embedded pairs, in float32. Two pairs of the same car are no negatives of each other."""
    with torch.autocast(images.device.type, enabled=False):
        scores = log_scale.float().exp() * (images.float() @ texts.float().T)
        same = cars[:, None] == cars[None, :]
        same.fill_diagonal_(False)
        scores = scores.masked_fill(same, -torch.inf)
        pairs = torch.arange(len(cars), device=scores.device)
        loss = (functional.cross_entropy(scores, pairs) + functional.cross_entropy(scores.T, pairs)) / 2
        matched = (scores.detach().argmax(dim=1) == pairs).float().mean()
    return loss, {"matched": matched}


def _embedded_on_all_ranks(model: Any, parts: Sequence[Batch]) -> tuple[list[int], tuple[torch.Tensor, torch.Tensor]]:
    """How many samples each rank has, and our own embedded. Memory that runs out on one rank runs out on all."""
    samples = sum(len(part["car"]) for part in parts)
    if not dist.is_initialized():
        return [samples], _embedded(model, parts)
    own = None
    try:
        own = _embedded(model, parts)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # The others would wait for our embeddings for ever: they have to know before.
    counts = counts_of_all(-1 if own is None else samples)
    if own is None or min(counts) < 0:
        raise torch.OutOfMemoryError("memory ran out on a rank while it embedded its samples")
    return counts, own


def _scaled_by(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda gradient: gradient * factor


def _embedded(model: Any, parts: Sequence[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and texts of all parts. Only the last part keeps its activations: backward comes to it first."""
    *earlier, last = parts
    # Done again with the random state of the first time, so that dropout drops the same.
    done = [checkpoint(model, part["image"], part["tokens"], use_reentrant=False) for part in earlier]
    done.append(model(last["image"], last["tokens"]))
    images, texts = zip(*done, strict=True)
    return torch.cat(images), torch.cat(texts)
