"""Samples packed into rows and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fulltilt.feed.sample_layout import ShapeChanged, Unstorable, layout_of

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
    assert layout.is_in(back, rows[1])
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
