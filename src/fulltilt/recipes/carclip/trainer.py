"""From a request to a job for the engine: what is checked before, said at the start and left at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fulltilt.errors import UsageError
from fulltilt.recipes.carclip import BUILT_IN, GIVE, TEMPLATES, CarClipOptions
from fulltilt.recipes.carclip import data as table
from fulltilt.recipes.carclip.data import CarPictures, CarViews, Label, Picture, captions_of, prompts
from fulltilt.recipes.carclip.loss import compared, contrastive_loss
from fulltilt.recipes.carclip.metrics import WholeSet
from fulltilt.recipes.carclip.model import (
    TOKENIZER,
    DualEncoder,
    Loaded,
    load_hugging_face,
    random_weights,
)
from fulltilt.recipes.pretrained import own_tokenizer, refuse_unavailable
from fulltilt.recipes.recipe import Request
from fulltilt.recipes.run_folder import refuse_foreign, refuse_to_replace, written_by_library
from fulltilt.train.config import TrainSettings, did_you_mean
from fulltilt.train.distributed import detect, device_of
from fulltilt.train.job import Job, Stage

# Above it a pretrained CLIP forgets more than it learns; 2e-5 is usual.
GENTLE_LR = 1e-4
# A larger share of the pictures is not left out without a word.
TOLD_SHARE = 0.05


def check_options(request: Request) -> None:
    """Look at model name and templates. Raises UsageError."""
    options: CarClipOptions = request.options
    model = options.model
    named = model in ("auto", *BUILT_IN) or "/" in model or Path(model).is_dir()
    if not named:
        raise UsageError(
            f"there is no model {model!r}{did_you_mean(model, BUILT_IN)}",
            f"Give a folder, a hub name such as openai/clip-vit-base-patch32, or {', '.join(BUILT_IN)}.",
        )
    if options.image_size is not None and model not in ("auto", *BUILT_IN):
        raise UsageError(f"image_size is for {' and '.join(BUILT_IN)}: {model} has a size of its own", "Leave it out.")
    if not request.settings.drop_last:
        raise UsageError("drop_last: false would end an epoch with a smaller, easier comparison", "Leave it out.")
    if request.settings.batch_size * request.settings.accumulation == 1:
        raise UsageError("batch_size: 1 compares a picture with its own caption alone", "Set 2 or more; 64 is usual.")
    if request.settings.fsdp:
        raise UsageError("carclip does not go with fsdp: its loss and metrics reach into the model", "Leave it out.")
    _templates(options)
    if model not in ("auto", *BUILT_IN):
        refuse_unavailable(model, GIVE)
        refuse_to_replace(model, request.out)


def check(request: Request) -> None:
    """Look at every picture before anything is built. Raises UsageError, DataError."""
    pictures = table.read(request.data, request.options.val_share)
    table.refuse_one_car(pictures)
    table.check_readable(pictures)


def run(request: Request) -> Mapping[str, float]:
    """Train, and leave the model in Hugging Face's format."""
    if request.options.export:
        refuse_foreign(request.out / "model")  # better now than after the training
    job, loaded = build(request)
    metrics = request.train(job)
    if request.options.export and detect().rank == 0:
        folder = request.out / "model"
        with written_by_library(folder) as private:
            loaded.model.save(private)
        print(f"The trained model is in {folder}", flush=True)
    return metrics


def build(request: Request) -> tuple[Job, Loaded]:
    """The job, and the model with its tokenizer."""
    options: CarClipOptions = request.options
    templates = _templates(options)
    pictures = table.read(request.data, options.val_share)
    labels = sorted({picture.label for picture in pictures if picture.label is not None})
    all_prompts = [prompts(label, templates) for label in labels]
    captions = [caption for picture in pictures for caption in captions_of(picture, templates)]
    captions += [prompt for texts in all_prompts for prompt in texts]
    torch.manual_seed(request.settings.seed)  # random weights are the run's own
    loaded = load_model(request, captions)
    if detect().rank == 0:
        for line in opening(pictures, labels, loaded, request.settings):
            print(line, flush=True)

    def samples(split: str) -> CarPictures:
        chosen = [picture for picture in pictures if picture.split == split]
        return CarPictures(chosen, loaded.image_size, labels, templates, loaded.tokenise)

    job = Job(
        model=loaded.model,
        loss=contrastive_loss,
        joint=True,
        data=samples("train"),
        augment=CarViews(loaded.image_size, augment=options.augment),
        eval_data=samples("val"),
        eval_augment=CarViews(loaded.image_size, augment=False),
        eval_loss=embed_for_metrics,
        eval_metrics=WholeSet(loaded.model, labels, all_prompts, loaded.tokenise),
        stages=(Stage("training", request.settings.epochs, frozen=_frozen(options, loaded.model)),),
        name="carclip",
    )
    return job, loaded


def load_model(request: Request, captions: Sequence[str]) -> Loaded:
    """The model that the options name; ``auto`` is ViT-B/32 on a GPU and a small one on a CPU."""
    options: CarClipOptions = request.options
    name = options.model
    if name == "auto":
        name = "vit-b-32" if device_of(request.settings.device, 0).type == "cuda" else "small"
    if name not in BUILT_IN:
        return load_hugging_face(name, captions)
    tokenizer = own_tokenizer(request, captions, **TOKENIZER)
    return random_weights(name, tokenizer, captions, options.image_size, options.temperature)


def embed_for_metrics(
    model: Any, batch: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The loss within a validation batch, and what the metrics of the whole set need of it."""
    images, texts = model(batch["image"], batch["tokens"])
    loss, found = compared(images, texts, batch["car"], model.log_scale)
    return loss, found, {"images": images, "texts": texts, "car": batch["car"], "label": batch["label"]}


def opening(pictures: Sequence[Picture], labels: Sequence[Label], loaded: Loaded, settings: TrainSettings) -> list[str]:
    """What a run says of its data, its model and its batches before it starts."""
    train = sum(picture.split == "train" for picture in pictures)
    weights = sum(parameter.numel() for parameter in loaded.model.parameters())
    lines = [
        f"Data: {train} pictures to train, {len(pictures) - train} to validate, {len(labels)} cars by make/model/year",
        f"Model: {loaded.about}, {weights / 1e6:.1f} M weights, pictures of {loaded.image_size} pixels",
    ]
    if not loaded.pretrained:
        lines.append("For pretrained weights: --model openai/clip-vit-base-patch32, or a folder.")
    elif settings.lr > GENTLE_LR:
        lines.append(f"warning: lr {settings.lr:g} is high for pretrained weights; 2e-5 is usual")
    whole = settings.batch_size * settings.accumulation
    if train > whole and train % whole > TOLD_SHARE * train:
        left = f"{train % whole} of {train} pictures"
        lines.append(f"Each epoch leaves out {left}, other ones each time: a step compares a whole batch of {whole}")
    if settings.accumulation > 1:
        lines.append(
            f"A step compares {whole} pictures with {whole} captions, in {settings.accumulation} parts of"
            f" {settings.batch_size}: the gradient of one batch of {whole}, which plain accumulation does not give"
        )
    return lines


def _frozen(options: CarClipOptions, model: DualEncoder) -> tuple[str, ...]:
    image = model.image_part if options.freeze in ("image", "both") else ()
    text = model.text_part if options.freeze in ("text", "both") else ()
    return (*image, *text, *(() if options.learn_temperature else ("*logit_scale",)))


def _templates(options: CarClipOptions) -> tuple[str, ...]:
    return table.read_templates(None if options.templates is None else Path(options.templates), TEMPLATES)
