"""How well pictures and captions find each other, and how well make, model and year are named. On the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from fulltilt.recipes.carclip.data import Label
from fulltilt.recipes.carclip.model import DualEncoder

RANKS = (1, 5, 10)
# Rows of the similarity matrix at a time: 1024 × 100,000 in float32 are 400 MB.
CHUNK = 1024


def recalls(images: torch.Tensor, texts: torch.Tensor, cars: torch.Tensor) -> dict[str, float]:
    """Recall at 1, 5 and 10 from picture to caption (``i2t``) and back (``t2i``), and the mean of both at 1.

    Pictures of one car share a caption: the gallery holds it once, and any of its pictures counts. A wrong entry that
    scores just as high comes first, so that a model that says the same of everything finds nothing.
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
    """For each picture how many captions come before its own."""
    for rows, own in zip(torch.split(images, CHUNK), torch.split(group, CHUNK), strict=True):
        scores = rows @ gallery.T
        yield (scores >= scores.gather(1, own[:, None])).sum(dim=1) - 1


def _image_places(images: torch.Tensor, gallery: torch.Tensor, group: torch.Tensor) -> Iterator[torch.Tensor]:
    """For each caption how many pictures of other cars come before the first of its own."""
    for first, rows in zip(range(0, len(gallery), CHUNK), torch.split(gallery, CHUNK), strict=True):
        scores = rows @ images.T
        own = group[None, :] == torch.arange(first, first + len(rows), device=group.device)[:, None]
        best = scores.masked_fill(~own, -torch.inf).amax(dim=1, keepdim=True)
        yield ((scores >= best) & ~own).sum(dim=1)


def named(
    images: torch.Tensor, labels: torch.Tensor, classes: torch.Tensor, names: Sequence[Label]
) -> dict[str, float]:
    """Zero-shot accuracy: the label whose prompts lie nearest. Right as a whole, in the make, in make and model."""
    known = labels >= 0
    images, labels = images[known], labels[known]
    guesses = torch.cat([(rows @ classes.T).argmax(dim=1) for rows in torch.split(images, CHUNK)])
    found = {"zero_shot": float((guesses == labels).double().mean())}
    for name, depth in (("zero_shot_make", 1), ("zero_shot_model", 2)):
        parts = {part: number for number, part in enumerate(dict.fromkeys(label[:depth] for label in names))}
        number = torch.tensor([parts[label[:depth]] for label in names], device=labels.device)
        found[name] = float((number[guesses] == number[labels]).double().mean())
    return found


class WholeSet:
    """The engine's ``eval_metrics``: recalls over the whole set, and zero-shot accuracy where labels are known."""

    def __init__(
        self,
        model: DualEncoder,
        labels: Sequence[Label],
        prompts: Sequence[Sequence[str]],
        tokenise: Callable[[list[str]], torch.Tensor],
    ) -> None:
        self.model, self.labels = model, labels
        self.tokens = tokenise([text for texts in prompts for text in texts]) if labels else None

    @torch.inference_mode()
    def __call__(self, kept: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Metrics of all samples' embeddings."""
        device = self.model.log_scale.device
        images, texts, cars, labels = (kept[name].to(device) for name in ("images", "texts", "car", "label"))
        found = recalls(images, texts, cars)
        if self.tokens is not None and bool((labels >= 0).any()):
            found |= named(images, labels, self.class_embeddings(device), self.labels)
        return found

    def class_embeddings(self, device: torch.device) -> torch.Tensor:
        """[labels, width]: the mean direction of a label's prompts."""
        assert self.tokens is not None
        training = self.model.training
        self.model.eval()
        try:
            embedded = torch.cat([self.model.embed_texts(part.to(device)) for part in torch.split(self.tokens, CHUNK)])
        finally:
            self.model.train(training)
        return torch.nn.functional.normalize(embedded.view(len(self.labels), -1, embedded.shape[1]).mean(1), dim=-1)
