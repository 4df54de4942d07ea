"""The pure decisions of the feed: tiers, layouts and orders."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fulltilt import feed
from fulltilt.errors import DoesNotFit, UsageError
from fulltilt.feed import tiers, worker_pool
from fulltilt.feed.epoch_order import SAMPLE_BITS, Order, numbered, spread
from fulltilt.feed.sample_layout import ShapeChanged, Unstorable, layout_of, same_sample
from fulltilt.feed.sample_reader import ShapesDiffer
from fulltilt.feed.tiers import choose_tier, measure_room
from fulltilt.records import CpuCapacity

from .conftest import Drawn

GIB = 1024**3
ROOM = {"vram": 10 * GIB, "pinned": 20 * GIB, "ram": 40 * GIB, "disk": 100 * GIB}


@pytest.mark.parametrize(("need", "tier"), [(10, "vram"), (11, "pinned"), (21, "ram"), (41, "disk"), (101, "none")])
def test_the_first_tier_with_room_is_taken(need, tier):
    choice = choose_tier(need * GIB, ROOM)
    assert choice.tier == tier
    assert f"{need} GiB" in choice.reason


def test_a_tier_that_is_asked_for_is_taken_or_refused():
    assert choose_tier(GIB, ROOM, "ram").tier == "ram"
    with pytest.raises(DoesNotFit, match=r"needs 11 GiB; vram has room for 10 GiB"):
        choose_tier(11 * GIB, ROOM, "vram")
    no_gpu = {"ram": GIB}
    with pytest.raises(UsageError, match="no such memory"):
        choose_tier(GIB, no_gpu, "vram")
    assert choose_tier(2 * GIB, no_gpu).tier == "none"


def test_room_leaves_the_model_its_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 12 * GIB)
    cuda = torch.device("cuda", 0)
    unknown = measure_room(cuda, tmp_path)["vram"]
    settled = measure_room(cuda, tmp_path, model_has_run=True)["vram"]
    stated = measure_room(cuda, tmp_path, reserve_bytes=30 * GIB)["vram"]
    assert unknown == 20 * GIB  # half of the GPU is left for a model that nobody has seen yet
    assert settled == 60 * GIB - int(80 * GIB * 0.08)
    assert stated == 60 * GIB - int(80 * GIB * 0.08) - 18 * GIB  # 12 of the 30 are taken already


def test_memory_is_shared_by_the_ranks_of_a_machine_and_bounded_by_its_cgroup(monkeypatch, tmp_path):
    cpu = torch.device("cpu")
    alone = measure_room(cpu, tmp_path)["ram"]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert measure_room(cpu, tmp_path)["ram"] == pytest.approx(alone / 4, rel=0.2)
    monkeypatch.setattr(tiers, "memory_headroom_bytes", lambda: 4 * GIB)
    assert measure_room(cpu, tmp_path)["ram"] < GIB


@pytest.mark.parametrize(
    ("usable", "cores", "ranks", "workers"),
    [(16, 8, 1, 8), (16, 16, 1, 16), (0.5, 8, 1, 1), (16, 8, 4, 2), (3, 8, 1, 3)],
)
def test_one_worker_for_each_core_that_may_be_used(monkeypatch, usable, cores, ranks, workers):
    monkeypatch.setattr(worker_pool, "cpu_capacity", lambda: CpuCapacity(16, 16, None, usable))
    monkeypatch.setattr(worker_pool.psutil, "cpu_count", lambda logical: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert worker_pool.default_workers() == workers


# --------------------------------------------------------------------------- layouts

DTYPES = [torch.uint8, torch.int16, torch.int64, torch.float32, torch.float64, torch.bool, torch.bfloat16]
TENSORS = st.builds(
    lambda shape, dtype, seed: torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)
LEAVES = TENSORS | st.integers(-(2**40), 2**40) | st.floats(allow_nan=True) | st.booleans()
SAMPLES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(min_size=1, max_size=3), inner, min_size=1, max_size=3)
    ),
    max_leaves=6,
)


@given(SAMPLES)
@settings(max_examples=150, deadline=None)
def test_any_sample_comes_back_as_it_was(sample):
    layout = layout_of(sample)
    rows = torch.zeros(2, layout.row_bytes, dtype=torch.uint8)
    layout.pack(sample, rows[1])
    back = layout.build([part[1] for part in layout.split(rows)])
    assert same_sample(sample, back)
    assert layout.row_bytes % 16 == 0
    assert all(leaf.offset % 16 == 0 for leaf in layout.leaves)


def test_what_does_not_fit_a_layout_is_told():
    layout = layout_of((torch.zeros(3), 1))
    row = torch.zeros(layout.row_bytes, dtype=torch.uint8)
    for odd, why in (
        ((torch.zeros(4), 1), r"\[0\] float32\[4\] instead of"),
        ((torch.zeros(3).double(), 1), "float64"),
        ((torch.zeros(3),), "its structure differs"),
        ((torch.zeros(3), 1.5), r"\[1\] float64"),
    ):
        with pytest.raises(ShapeChanged, match=why):
            layout.pack(odd, row)
    with pytest.raises(Unstorable, match="is str"):
        layout_of((torch.zeros(1), "name"))
    with pytest.raises(Unstorable, match="without any tensor"):
        layout_of([])
    with pytest.raises(Unstorable, match="sparse"):
        layout_of(torch.eye(3).to_sparse())
    with pytest.raises(Unstorable, match="a meta tensor"):
        layout_of(torch.eye(3, device="meta"))


# --------------------------------------------------------------------------- orders


@given(
    samples=st.integers(1, 200),
    batch=st.integers(1, 50),
    world=st.integers(1, 5),
    shuffle=st.booleans(),
    drop=st.booleans(),
    epoch=st.integers(0, 5),
)
@settings(max_examples=80, deadline=None)
def test_ranks_cover_the_epoch_with_equally_many_batches(samples, batch, world, shuffle, drop, epoch):
    orders = [Order(samples, batch, shuffle, 3, drop, rank, world) for rank in range(world)]
    batches = [order.batches(epoch) for order in orders]
    assert len({len(mine) for mine in batches}) == 1
    assert all(len(mine) == order.batches_per_epoch() for mine, order in zip(batches, orders, strict=True))
    drawn = [int(i) for mine in batches for indices in mine for i in indices]
    if drop:
        assert all(len(indices) == batch for mine in batches for indices in mine)
    else:
        assert set(drawn) == set(range(samples))
        assert len(drawn) - samples < world or samples < world


def test_checks_are_spread_over_the_whole_data_set():
    assert list(spread(100, 5)) == [0, 24, 49, 74, 99]
    assert list(spread(2, 8)) == [0, 1]
    assert list(spread(1, 8)) == [0]


def test_samples_drawn_once_are_not_sorted(monkeypatch):
    """With a sampler of a hundred million samples the first batch waited for it; a repeated one is still numbered."""
    batches = list(torch.split(torch.randperm(100), 8))
    repeated = [*batches, torch.tensor([int(batches[0][0])])]
    assert int(numbered(repeated)[-1][0]) == int(batches[0][0]) + (1 << SAMPLE_BITS)
    monkeypatch.setattr(torch, "sort", None)
    assert numbered(batches) is batches


@pytest.mark.parametrize("as_given", [int, float, np.int32, torch.tensor, str], ids=lambda kind: kind.__name__)
def test_a_sampler_may_give_numbers_of_any_kind(as_given):
    order = Order(samples=10, batch_size=4, sampler=[as_given(number) for number in (3, 1, 2, 9, 9)])
    assert [batch.tolist() for batch in order.batches(0)] == [[3, 1, 2, 9], [9]]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("none", [0, 2, 12], ids=["the first", "looked at", "not looked at"])
def test_none_for_a_bad_sample_is_skipped_wherever_it_stands(none, workers):
    """Data sets return None for a file that cannot be read; among the samples looked at first, it ended the job."""
    dataset = Drawn(lambda index: None if index == none else torch.tensor(index), samples=20)
    with feed.loader(dataset, 5, num_workers=workers, on_bad_sample="skip", max_bad_share=0.1) as loader:
        for _ in range(2):
            assert sorted(torch.cat(list(loader)).tolist()) == [index for index in range(20) if index != none]
        assert any(f"skipped sample {none}:" in note for note in loader.notes)


def test_shapes_of_which_no_kind_prevails_are_told_under_skip_too():
    ragged = Drawn(lambda index: torch.zeros(index + 1), samples=20)
    with pytest.raises(ShapesDiffer, match="differs from the first sample"):
        feed.loader(ragged, 5, num_workers=0, on_bad_sample="skip")
