"""The carclip recipe as a Job: checks, the contrastive loss, recall metrics, and export of the model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fulltilt.errors import UsageError
from fulltilt.recipes.carclip import BUILT_IN, GIVE, CarClipOptions
from fulltilt.recipes.carclip import data as table
from fulltilt.recipes.carclip.data import CarPictures, CarViews, Picture, captions_of
from fulltilt.recipes.carclip.model import (
    TOKENIZER,
    DualEncoder,
    fixed_length,
    load_hugging_face,
    random_weights,
    tokenised,
)
from fulltilt.recipes.images import sizes
from fulltilt.recipes.out_folder import refuse_foreign, written_by_library
from fulltilt.recipes.pretrained import check_model, evaluated_weights, own_tokenizer
from fulltilt.recipes.recipe import Request, say
from fulltilt.train.checkpoint import described
from fulltilt.train.config import TrainSettings, did_you_mean
from fulltilt.train.data_source import counts_of_all, rows_of_all
from fulltilt.train.distributed import device_of, rank_from_env
from fulltilt.train.guards import is_out_of_memory
from fulltilt.train.job import Job, Stage


def check_options(request: Request) -> None:
    """Check model name, settings and templates. Raises UsageError."""
    options: CarClipOptions = request.options
    model = options.model
    own = model in ("auto", *BUILT_IN)
    if not (own or "/" in model or Path(model).is_dir()):
        raise UsageError(
            f"there is no model {model!r}{did_you_mean(model, BUILT_IN)}",
            f"Give a folder, a hub name such as openai/clip-vit-base-patch32, or {', '.join(BUILT_IN)}.",
        )
    if options.image_size is not None and not own:
        raise UsageError(f"image_size is for {' and '.join(BUILT_IN)}: {model} has a size of its own", "Leave it out.")
    if not request.settings.drop_last:
        raise UsageError("drop_last: false would end an epoch with a smaller, easier comparison", "Leave it out.")
    if request.settings.batch_size * request.settings.accumulation == 1:
        raise UsageError("batch_size: 1 compares a picture with its own caption alone", "Set 2 or more; 64 is usual.")
    if request.settings.fsdp:
        raise UsageError("carclip does not go with fsdp: its loss and metrics reach into the model", "Leave it out.")
    table.read_templates(options.templates)
    if not own:
        check_model(model, request.out, GIVE)


def check(request: Request) -> None:
    """Check every image. Raises UsageError, DataError."""
    pictures = table.read(request.data, request.options.val_share)
    table.refuse_one_car(pictures)
    sizes(picture.path for picture in pictures)


def run(request: Request) -> Mapping[str, float]:
    """Train, and save the model in Hugging Face's format."""
    if request.options.export:
        refuse_foreign(request.out / "model")  # before the training
    job = build(request)
    metrics = request.train(job)
    if request.options.export and rank_from_env().rank == 0:
        folder = request.out / "model"
        if request.settings.ema_decay is not None:
            job.model.load_state_dict(evaluated_weights(described(request.out / "checkpoints")[0].folder))
        with written_by_library(folder) as private:
            job.model.save(private)  # type: ignore[operator]
        say(f"The trained model is in {folder}")
    return metrics


def build(request: Request) -> Job:
    """The Job of a request."""
    options: CarClipOptions = request.options
    templates = table.read_templates(options.templates)
    pictures = table.read(request.data, options.val_share)
    captions = [caption for picture in pictures for caption in captions_of(picture, templates)]
    torch.manual_seed(request.settings.seed)  # for random weights
    model = load_model(request, captions)
    length = fixed_length(model.tokenizer, captions, model.clip.config.text_config.max_position_embeddings)
    _tell(pictures, model, request.settings)

    def samples(split: str) -> CarPictures:
        chosen = [picture for picture in pictures if picture.split == split]
        return CarPictures(chosen, model.image_size, templates, partial(tokenised, model.tokenizer, length=length))

    return Job(
        model=model,
        loss=contrastive_loss,
        joint=True,
        data=samples("train"),
        augment=CarViews(model.image_size, augment=options.augment),
        eval_data=samples("val"),
        eval_augment=CarViews(model.image_size, augment=False),
        eval_loss=embed_for_metrics,
        eval_metrics=partial(whole_set, device_of(request.settings.device, rank_from_env().local_rank)),
        stages=(Stage("training", request.settings.epochs, frozen=_frozen(options)),),
        name="carclip",
    )


def load_model(request: Request, captions: Sequence[str]) -> DualEncoder:
    """The model of the options; ``auto`` is ViT-B/32 on a GPU and the small one on a CPU."""
    options: CarClipOptions = request.options
    name = options.model
    if name == "auto":
        name = "vit-b-32" if device_of(request.settings.device, 0).type == "cuda" else "small"
    if name not in BUILT_IN:
        return load_hugging_face(name)
    tokenizer = own_tokenizer(request, captions, **TOKENIZER)
    return random_weights(name, tokenizer, options.image_size, options.temperature)


def embed_for_metrics(
    model: Any, batch: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The loss within a validation batch, and the embeddings for the metrics of the whole set."""
    images, texts = model(batch["image"], batch["tokens"])
    loss, found = compared(images, texts, batch["car"], model.log_scale)
    return loss, found, {"images": images, "texts": texts, "car": batch["car"]}


def _tell(pictures: Sequence[Picture], model: DualEncoder, settings: TrainSettings) -> None:
    train, weights = sum(one.split == "train" for one in pictures), sum(one.numel() for one in model.parameters())
    say(f"Data: {train} pictures to train, {len(pictures) - train} to validate")
    say(f"Model: {model.about}, {weights / 1e6:.1f} M weights, pictures of {model.image_size} pixels")
    if settings.accumulation > 1:
        whole = settings.batch_size * settings.accumulation
        say(
            f"A step compares {whole} pictures with {whole} captions, in {settings.accumulation} parts of"
            f" {settings.batch_size}: the gradient of one batch of {whole}, which plain accumulation does not give"
        )


def _frozen(options: CarClipOptions) -> tuple[str, ...]:
    towers = {"image": ("vision",), "text": ("text",), "both": ("vision", "text"), "none": ()}[options.freeze]
    return (*(f"clip.{tower}_model.*" for tower in towers), *(() if options.learn_temperature else ("*logit_scale",)))


# --------------------------------------------------------------------------- the loss

# Every image against every caption of the step, over all micro-batches and ranks. Plain gradient accumulation would
# have fewer negatives, and thus another loss. Here a step is embedded part by part, compared as a whole, and each part
# is recomputed in backward (GradCache, Gao et al. 2021): the gradient of one large batch in the memory of one part.

# As in CLIP: beyond a scale of 100 training becomes unstable.
MOST_LOG_SCALE = math.log(100.0)

Batch = Mapping[str, torch.Tensor]


def contrastive_loss(model: Any, parts: Sequence[Batch]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The symmetric InfoNCE loss over the parts of all ranks, and the share of pairs found (``matched``).

    Each rank has all embeddings and differentiates the whole loss with respect to its own, so that ranks only exchange
    gradients of the weights.
    """
    counts, own = _embedded_on_all_ranks(model, parts)
    cars = torch.cat([part["car"] for part in parts])
    images, texts = own
    if len(counts) > 1:
        # The engine weighs a rank's loss by its share of the samples. That is right for the temperature, but the
        # gradient of a rank's own embeddings is complete already.
        share = len(cars) / sum(counts)
        for embedded in own:
            if embedded.requires_grad:
                embedded.register_hook(lambda gradient: gradient / share)  # type: ignore[no-untyped-call, unused-ignore]
        images, texts, cars = (rows_of_all(rows, counts) for rows in (images, texts, cars))
    with torch.no_grad():
        model.log_scale.clamp_(0.0, MOST_LOG_SCALE)
    return compared(images, texts, cars, model.log_scale)


def compared(
    images: torch.Tensor, texts: torch.Tensor, cars: torch.Tensor, log_scale: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of embedded pairs, in float32. Pairs of the same car are no negatives."""
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
    """The samples of each rank, and our embeddings. Out-of-memory on one rank is raised on all."""
    samples = sum(len(part["car"]) for part in parts)
    if not dist.is_initialized():
        return [samples], _embedded(model, parts)
    own = None
    try:
        own = _embedded(model, parts)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # The others would wait for our embeddings for ever.
    counts = counts_of_all(-1 if own is None else samples)
    if own is None or min(counts) < 0:
        raise torch.OutOfMemoryError("memory ran out on a rank while it embedded its samples")
    return counts, own


def _embedded(model: Any, parts: Sequence[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings of all parts. Only the last part keeps its activations: backward reaches it first."""
    *earlier, last = parts
    # Recomputed with the same random state, so that dropout is the same.
    done = [checkpoint(model, part["image"], part["tokens"], use_reentrant=False) for part in earlier]
    done.append(model(last["image"], last["tokens"]))
    images, texts = zip(*done, strict=True)
    return torch.cat(images), torch.cat(texts)


# --------------------------------------------------------------------------- metrics

RANKS = (1, 5, 10)
# Rows of the similarity matrix at a time: 1024 × 100,000 in float32 are 400 MB.
CHUNK = 1024


def recalls(images: torch.Tensor, texts: torch.Tensor, cars: torch.Tensor) -> dict[str, float]:
    """Recall at 1, 5 and 10 from image to caption (``i2t``) and back (``t2i``), and the mean of both at 1.

    Images of one car share a caption: the gallery holds it once, and any of its images counts. Of equal scores a wrong
    entry ranks first, so that a constant model finds nothing.
    """
    names, group = torch.unique(cars, return_inverse=True)
    first = torch.full((len(names),), len(cars), device=cars.device).scatter_reduce(
        0, group, torch.arange(len(cars), device=cars.device), "amin"
    )
    gallery = texts[first]
    found = {}
    for name, places in (
        ("i2t", torch.cat([*_text_places(images, gallery, group)])),
        ("t2i", torch.cat([*_image_places(images, gallery, group)])),
    ):
        for rank in RANKS:
            found[f"{name}_recall_at_{rank}"] = float((places < rank).double().mean())
    found["recall_at_1"] = (found["i2t_recall_at_1"] + found["t2i_recall_at_1"]) / 2
    return found


def _text_places(images: torch.Tensor, gallery: torch.Tensor, group: torch.Tensor) -> Iterator[torch.Tensor]:
    """For each image, how many captions rank before its own."""
    for rows, own in zip(torch.split(images, CHUNK), torch.split(group, CHUNK), strict=True):
        scores = rows @ gallery.T
        yield (scores >= scores.gather(1, own[:, None])).sum(dim=1) - 1


def _image_places(images: torch.Tensor, gallery: torch.Tensor, group: torch.Tensor) -> Iterator[torch.Tensor]:
    """For each caption, how many images of other cars rank before the first of its own."""
    for first, rows in zip(range(0, len(gallery), CHUNK), torch.split(gallery, CHUNK), strict=True):
        scores = rows @ images.T
        own = group[None, :] == torch.arange(first, first + len(rows), device=group.device)[:, None]
        best = scores.masked_fill(~own, -torch.inf).amax(dim=1, keepdim=True)
        yield ((scores >= best) & ~own).sum(dim=1)


def whole_set(device: torch.device, kept: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Recalls over the whole set, counted on ``device``."""
    return recalls(*(kept[name].to(device) for name in ("images", "texts", "car")))
