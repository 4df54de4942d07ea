import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulltilt.probes.gpu import visible_uuids

A, B, C = "GPU-aaaa1111-0000", "GPU-aabb2222-0000", "GPU-cccc3333-0000"
ALL = (A, B, C)
MIGS = ("MIG-1111", "MIG-2222")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ALL),
        ("", ()),
        ("-1", ()),
        ("0", (A,)),
        ("2,0", (C, A)),
        (" 1 , 2 ", (B, C)),
        ("0,-1,1", (A,)),  # the list ends at the first invalid entry
        ("0,7,1", (A,)),
        ("0,banana,1", (A,)),
        ("banana", ()),
        ("0,1,0", ()),  # a device named twice
        (C, (C,)),
        ("GPU-c", (C,)),  # a prefix
        ("GPU-aa", ()),  # an ambiguous prefix
        ("GPU-aaaa,GPU-cccc", (A, C)),
        (f"{A},1", (A,)),  # kinds are not mixed
        (f"1,{A}", (B,)),
        (f"{A},GPU-aaaa", ()),  # twice, under two names
        ("GPU-ffff,GPU-cccc", ()),
        ("MIG-1111", ("MIG-1111",)),
        ("MIG-2", ("MIG-2222",)),
        ("MIG-1111,MIG-2222", ("MIG-1111",)),  # CUDA uses one MIG device
        ("MIG-", ()),
        ("MIG-9999", ()),
    ],
)
def test_the_rules_of_cuda(value, expected):
    assert visible_uuids(value, ALL, MIGS) == expected


@given(st.lists(st.integers(-2, 5), max_size=6))
def test_indices_name_devices_up_to_the_first_invalid_one(indices):
    valid = []
    for index in indices:
        if not 0 <= index < 3:
            break
        valid.append(index)
    expected = () if len(set(valid)) < len(valid) else tuple(ALL[index] for index in valid)
    assert visible_uuids(",".join(map(str, indices)), ALL) == expected


@given(st.text(max_size=30))
def test_no_value_raises_or_invents_a_gpu(value):
    assert set(visible_uuids(value, ALL, MIGS)) <= {*ALL, "MIG-1111", "MIG-2222"}
