"""Text: every sample once, hardly any padding, random all the same, within the token budget, even over ranks."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fulltilt import feed
from fulltilt.errors import DataError, FulltiltError, UsageError
from fulltilt.feed.text import Batching, Tokens, padded_length, tokenise


def sequences(count=500):
    lengths = torch.randint(1, 60, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    return [[number + 1] * length for number, length in enumerate(lengths)]


@pytest.mark.parametrize("options", [{"batch_size": 16}, {"tokens_per_batch": 512}])
def test_every_text_once_and_unchanged(options):
    texts = sequences()
    loader = feed.text(texts, labels=list(range(500)), **options)
    orders = []
    for _ in range(2):
        assert len(loader) > 0
        expected, seen = len(loader), []
        batches = list(loader)
        assert len(batches) == expected
        for batch in batches:
            for ids, mask, label in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
                assert ids[mask.bool()].tolist() == texts[int(label)]
                assert int(ids[~mask.bool()].sum()) == 0
            seen += batch["labels"].tolist()
        assert sorted(seen) == list(range(500))
        orders.append(seen)
    assert orders[0] != orders[1]


def test_padding_is_measured_and_small():
    texts = sequences(2000)
    loader = feed.text(texts, batch_size=32)
    assert loader.padding_waste is None
    padded = real = 0
    for batch in loader:
        padded += batch["input_ids"].numel()
        real += int(batch["attention_mask"].sum())
    assert loader.padding_waste == pytest.approx(1 - real / padded)
    lengths = Tokens.of(texts).lengths
    unsorted = [lengths[batch] for batch in torch.split(torch.randperm(2000), 32)]
    padded = sum(len(batch) * padded_length(int(batch.max()), 8) for batch in unsorted)
    assert loader.padding_waste < 0.15 < 1 - int(lengths.sum()) / padded


def test_batches_are_not_the_same_company_in_each_epoch():
    lengths = Tokens.of(sequences(2000)).lengths
    batching = Batching(batch_size=16, window=512)
    first, second = ({frozenset(batch.tolist()) for batch in batching.batches(lengths, epoch)} for epoch in (0, 1))
    assert len(first & second) < 3
    # Nor does training see short texts first: the lengths of consecutive batches are not sorted.
    means = torch.stack([lengths[batch].float().mean() for batch in batching.batches(lengths, 0)])
    correlation = torch.corrcoef(torch.stack([torch.arange(len(means)).float(), means]))[0, 1]
    assert abs(float(correlation)) < 0.3


@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=120),
    budget=st.integers(64, 800),
    multiple=st.sampled_from([1, 8]),
    world=st.integers(1, 4),
    epoch=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_the_token_budget_holds_and_ranks_are_even(lengths, budget, multiple, world, epoch):
    sizes = torch.tensor(lengths)
    batches = Batching(tokens_per_batch=budget, multiple=multiple, window=50).batches(sizes, epoch, world)
    assert len(batches) % world == 0
    assert {int(i) for batch in batches for i in batch} == set(range(len(lengths)))
    for batch in batches:
        cost = len(batch) * padded_length(int(sizes[batch].max()), multiple)
        assert cost <= budget or len(batch) == 1
    if world == 1:
        assert sum(len(batch) for batch in batches) == len(lengths)


def test_drop_last_keeps_one_size():
    lengths = Tokens.of(sequences(500)).lengths
    batches = Batching(batch_size=16, drop_last=True).batches(lengths, 0)
    assert {len(batch) for batch in batches} == {16}
    assert len(batches) == 500 // 16


def test_ranks_share_the_epoch():
    seen = []
    for rank in range(3):
        loader = feed.text(sequences(200), labels=list(range(200)), batch_size=8, rank=rank, world_size=3)
        seen += [label for batch in loader for label in batch["labels"].tolist()]
    assert set(seen) == set(range(200))


def test_texts_are_tokenised_once():
    calls = []

    def tokenizer(texts):
        calls.append(len(texts))
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}

    tokens = tokenise(["abc", "d", "ef"] * 700, tokenizer, max_length=2)
    assert calls == [1000, 1000, 100]
    assert tokens.lengths[:3].tolist() == [2, 1, 2]


def test_mistakes_are_told():
    with pytest.raises(UsageError, match="either batch_size or tokens_per_batch"):
        feed.text(sequences(4))
    with pytest.raises(DataError, match="4 texts and 3 labels"):
        feed.text(sequences(4), [1, 2, 3], batch_size=2)
    with pytest.raises(DataError, match="no text"):
        feed.text([], batch_size=2)


def test_a_resume_begins_at_any_batch():
    loader = feed.text(sequences(), labels=list(range(500)), tokens_per_batch=512)
    loader.set_epoch(2)
    whole = [batch["labels"].tolist() for batch in loader]
    loader.begin_at(2, 4)
    assert [batch["labels"].tolist() for batch in loader] == whole[4:]
    assert [batch["labels"].tolist() for batch in loader] != whole  # the epoch after it


def test_a_saved_state_goes_on_with_the_very_next_batch():
    def made(**changes):
        return feed.text(sequences(), labels=list(range(500)), **{"tokens_per_batch": 512, **changes})

    def labels(loader):
        return [batch["labels"].tolist() for batch in loader]

    loader, other = made(), made()
    labels(loader)
    whole, states = [], [loader.state_dict()]
    for batch in loader:
        whole.append(batch["labels"].tolist())
        states.append(loader.state_dict())
    following = labels(loader)
    for done in (0, 3, len(whole)):
        other.load_state_dict(pickle.loads(pickle.dumps(states[done])))
        assert other.state_dict() == states[done]
        assert labels(other) == (whole[done:])
        assert labels(other) == following
    for changes in ({"seed": 1}, {"tokens_per_batch": 256}, {"world_size": 2, "rank": 0}, {"window": 64}):
        with pytest.raises(UsageError, match="makes other batches"):
            made(**changes).load_state_dict(states[3])
    for wrong in (None, {}, {"epoch": 0, "batch": -1}):
        with pytest.raises(UsageError):
            other.load_state_dict(wrong)


@pytest.mark.parametrize("ids", [["ab", "c"], [[1.5, 2.0]], [[2**40]], [[[1]], [[2]]], [[1], None]])
def test_what_is_no_list_of_token_ids_is_told(ids):
    with pytest.raises(DataError, match="a text has to be a list of token ids"):
        feed.text(ids, batch_size=2)


@pytest.mark.parametrize("tokenizer", [lambda texts: "x", lambda texts: [[1]], lambda texts: {"input_ids": [[1]] * 3}])
def test_a_tokenizer_that_does_not_answer_for_each_text_is_told(tokenizer):
    with pytest.raises(DataError, match=r"the tokenizer gives .* for 2 texts"):
        feed.tokenise(["a", "b"], tokenizer)


@pytest.mark.parametrize("texts", ["abc", None, {"text": ["abc"]}, ["abc", None], ["abc", float("nan")]], ids=str)
def test_what_is_no_list_of_texts_is_told(texts):
    def letters(texts):
        return [[ord(letter) for letter in text] for text in texts]

    with pytest.raises((UsageError, DataError), match=r"^(the texts are|text 1 is)"):
        feed.tokenise(texts, letters)
    assert feed.tokenise(iter(["ab", "c"]), letters).lengths.tolist() == [2, 1]


def test_numbers_and_labels_that_mean_nothing_are_told():
    for wrong in ({"tokens_per_batch": 0}, {"batch_size": 0}, {"batch_size": 2, "window": 0}):
        with pytest.raises(UsageError, match="at least 1"):
            feed.text([[1], [2]], **wrong)
    with pytest.raises(DataError, match="labels are not numbers"):
        feed.text([[1], [2]], ["a", "b"], batch_size=2)
    with pytest.raises(UsageError, match="max_length is 0"):
        feed.tokenise(["a"], list, max_length=0)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": "4"},
        {"batch_size": 2.5},
        {"batch_size": 4, "pad_id": None},
        {"batch_size": 4, "labels": 5},
        {"batch_size": 4, "rank": 3, "world_size": 2},
    ],
    ids=str,
)
def test_an_argument_of_a_wrong_type_is_told_in_a_sentence(options):
    with pytest.raises(FulltiltError):
        feed.text(**{"tokens": [[1, 2]] * 8, **options})


def test_a_tokenizer_without_ids_is_told_and_arrays_will_do():
    with pytest.raises(DataError, match="input_ids"):
        tokenise(["a"], lambda texts: {"ids": [[1]]})
    made = tokenise(["a", "b"], lambda texts: {"input_ids": np.ones((len(texts), 3), dtype=int)})
    assert made.lengths.tolist() == [3, 3]
