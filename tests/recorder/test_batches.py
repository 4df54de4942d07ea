"""Samples are counted from the batch, whatever its structure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from fulltilt.recorder.loaders.batches import (
    count_bytes,
    count_samples,
    count_tensors,
    kind_of,
    padding_share,
    shapes_of,
)

IMAGE = torch.zeros(3, 8, 8)
PACKED = torch.nn.utils.rnn.pack_sequence([torch.zeros(2 + n % 3, 4) for n in range(6)], enforce_sorted=False)


class Ragged(NamedTuple):
    tokens: torch.Tensor
    lengths: torch.Tensor


@pytest.mark.parametrize(
    ("batch", "hint", "samples"),
    [
        (torch.zeros(5, 2), None, 5),
        ([torch.zeros(5, 2), torch.zeros(5)], 8, 5),  # the last, smaller batch
        ((torch.zeros(4, 3), torch.zeros(4)), 4, 4),
        ({"input_ids": torch.zeros(6, 9), "labels": torch.zeros(6)}, None, 6),
        ({"meta": "name", "image": torch.zeros(6, 9)}, None, 6),
        (np.zeros((7, 2)), None, 7),
        ((tuple(IMAGE for _ in range(4)), tuple({"boxes": torch.zeros(2, 4)} for _ in range(4))), 4, 4),
        ([{"image": IMAGE} for _ in range(5)], 5, 5),
        ([IMAGE] * 6, 6, 6),
        ([IMAGE], 1, 1),
        (["a", "b", "c"], None, 3),
        ([torch.zeros(4), torch.zeros(1)], 1, 1),  # one sample, drawn without batching
        ((torch.zeros(300), torch.tensor(4)), None, 1),  # a vector and its label, from a data set without indices
        ([torch.zeros(300), torch.tensor(4)], 1, 1),
        ([IMAGE, 4], None, 1),
        ({"image": IMAGE, "mask": IMAGE[:1], "label": 4}, None, 1),
        ((torch.zeros(64, 3), torch.zeros(64), 0.5), None, 64),  # a batch, and a number for all of it
        (torch.zeros(300), None, 1),
        (torch.zeros(300), 300, 300),  # a batch of numbers
        ([torch.zeros(300)], 1, 1),
        ([torch.zeros(64), torch.zeros(64)], None, 64),
        ([torch.zeros(64, 3), torch.zeros(64)], 1, 64),  # a batch that the data set itself made
        (([torch.zeros(4, 3), torch.zeros(4, 3)], torch.zeros(4)), 4, 4),  # two views of each sample
        (SimpleNamespace(x=torch.zeros(9, 2)), None, 9),
        (SimpleNamespace(num_graphs=11, x=torch.zeros(99, 2)), None, 11),
        (SimpleNamespace(packed=PACKED, names=["a"] * 6), 12, 6),
        ((PACKED, torch.zeros(6)), None, 6),
        (Ragged(torch.zeros(17, 2), torch.zeros(5)), None, 17),  # not the two fields
        (Ragged(torch.zeros(17, 2), torch.zeros(5)), 8, None),  # packed texts, none of whose columns has eight
        ((torch.zeros(900, 3), torch.zeros(1700, 2), torch.zeros(900)), 8, None),  # eight packed meshes
        ({"points": torch.zeros(900, 3), "owner": torch.zeros(899)}, 8, None),
        (torch.tensor(3.0), None, None),
        ("text", None, None),
        (None, None, None),
        ((), None, None),
    ],
)
def test_count_samples(batch: Any, hint: int | None, samples: int | None) -> None:
    assert count_samples(batch, hint) == samples


def test_bytes_and_kinds() -> None:
    batch = {"a": torch.zeros(4, 4), "b": [np.zeros(8, dtype=np.uint8)]}
    assert count_bytes(batch) == 64 + 8
    assert count_tensors(batch) == 2
    assert kind_of(batch) == "dict of numpy"
    assert kind_of([torch.zeros(2)]) == "list of tensor"
    assert kind_of(torch.zeros(2)) == "tensor"
    assert kind_of(["x"]) == "list of objects"


def test_padding_without_a_mask_is_told_by_rows_that_end_alike() -> None:
    """Texts filled up to the longest of the corpus, without a mask: nothing but compute was said to be left."""
    texts = torch.zeros(4, 40, dtype=torch.long)
    for row, length in enumerate((10, 20, 5, 15)):
        texts[row, :length] = torch.arange(1, length + 1) + 50 * row
    assert padding_share((texts, torch.ones(4))) == pytest.approx(1 - 50 / 160)
    assert padding_share({"ids": texts.int()}) == pytest.approx(1 - 50 / 160)
    assert padding_share(texts[:, :10].clone().clamp(max=2)) is None, "labels, not tokens"
    assert padding_share(torch.arange(160).reshape(4, 40)) is None, "no row is filled"
    assert padding_share(texts.float()) is None
    assert padding_share([texts[0], "a text"]) is None


def test_padding_comes_from_the_mask_where_there_is_one() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])
    assert padding_share({"attention_mask": mask}) == pytest.approx(5 / 8)
    assert padding_share({"input_ids": mask}) is None
    assert padding_share([mask]) is None


def test_the_shapes_of_a_batch_are_those_of_its_columns() -> None:
    images, labels = torch.zeros(4, 3, 8, 8), torch.zeros(4)
    assert shapes_of((images, labels, "name")) == ((4, 3, 8, 8), (4,))
    assert shapes_of({"images": images}) == ((4, 3, 8, 8),)
    assert shapes_of(images) == ((4, 3, 8, 8),)
    assert shapes_of("text") == ()
