"""HDF5: every sample once and unchanged, resident or streamed, with windows, several files and several ranks."""

from __future__ import annotations

import importlib
import itertools
import os

import numpy as np
import pytest
import torch

from fulltilt import feed
from fulltilt.errors import DataError, UsageError
from fulltilt.feed.hdf5_files import BlockReader, Hdf5Table, describe
from fulltilt.feed.random_numbers import uniform

h5py = pytest.importorskip("h5py")


@pytest.fixture
def files(tmp_path):
    """Two files of 250 and 130 rows; x holds the row's number in the whole, y its negative."""
    made, before = [], 0
    for number, rows in enumerate((250, 130)):
        path = tmp_path / f"{number}.h5"
        values = np.arange(before, before + rows)
        with h5py.File(path, "w") as file:
            x = np.repeat(values.astype("f4")[:, None], 5, axis=1)
            file.create_dataset("x", data=x, chunks=(32, 5), compression="gzip")
            file.create_dataset("y", data=-values.astype("i8"), chunks=(50,))
            file.create_dataset("group/z", data=values.astype("u1"))
        made.append(path)
        before += rows
    return made


@pytest.fixture
def small_blocks(monkeypatch):
    original = Hdf5Table.blocks
    monkeypatch.setattr(Hdf5Table, "blocks", lambda self, block_bytes=1400: original(self, block_bytes))


def rows_of(loader):
    return [int(value) for x, y in loader for value in x[:, 0]]


@pytest.mark.parametrize("residency", ["auto", "none"])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_row_once_with_its_label(files, small_blocks, residency, workers):
    with feed.hdf5(files, ["x", "y"], 32, residency=residency, num_workers=workers, mixing_rows=120) as loader:
        orders = []
        for _ in range(3):
            batches = list(loader)
            assert len(batches) == len(loader) == 12
            for x, y in batches:
                assert torch.equal(x[:, 0], -y.float())
                assert bool((x == x[:, :1]).all())
            orders.append([int(v) for _, y in batches for v in -y])
            assert sorted(orders[-1]) == list(range(380))
        assert orders[0] != orders[1]


def test_without_shuffle_the_order_is_that_of_the_files(files, small_blocks):
    for residency in ("ram", "none"):
        with feed.hdf5(files, ["x", "y"], 50, residency=residency, shuffle=False, num_workers=2) as loader:
            assert rows_of(loader) == list(range(380))


@pytest.mark.parametrize("residency", ["auto", "none"])
def test_two_parts_of_the_rows_share_none(files, small_blocks, residency):
    def rows(part):
        return sorted(rows_of(feed.hdf5(files, ["x", "y"], 32, part=part, residency=residency, num_workers=0)))

    first, rest = rows((0, 0.8)), rows((0.8, 1))
    assert first == [*range(200), *range(250, 354)]
    assert rest == [*range(200, 250), *range(354, 380)]


@pytest.mark.parametrize("residency", ["auto", "none"])
@pytest.mark.parametrize("epoch", [0, 3])
def test_a_resume_begins_at_any_batch(files, small_blocks, residency, epoch):
    def fresh():
        return feed.hdf5(files, ["x", "y"], 32, residency=residency, num_workers=0, mixing_rows=120)

    loader = fresh()
    loader.set_epoch(epoch)
    whole = rows_of(loader)
    for batch in (0, 5, 11, 12):
        resumed = fresh()
        resumed.begin_at(epoch, batch)
        assert rows_of(resumed) == whole[batch * 32 :]
        assert len(rows_of(resumed)) == 380  # the epoch after it, from its beginning


@pytest.mark.parametrize("residency", ["ram", "none"])
def test_rows_may_be_read_in_an_evaluation(files, small_blocks, residency):
    """Tensors made under inference mode cannot be written by the thread that reads."""
    with feed.hdf5(files, ["x", "y"], 32, residency=residency, num_workers=1, mixing_rows=120) as loader:
        with torch.inference_mode():
            assert len(rows_of(loader)) == 380
        assert len(rows_of(loader)) == 380


def test_above_memory_samples_mix_within_the_window_that_is_stated(files, small_blocks):
    with feed.hdf5(files, ["x", "y"], 20, residency="none", num_workers=0, mixing_rows=130) as loader:
        assert loader.tier == "none"
        assert 100 <= loader.mixing <= 150
        order = rows_of(loader)
    neighbours = sum(abs(a - b) == 1 for a, b in itertools.pairwise(order))
    assert neighbours < 20  # sequential reading would give 379
    with feed.hdf5(files, ["x", "y"], 20, residency="ram", num_workers=0) as loader:
        assert loader.mixing == 380


@pytest.mark.parametrize("residency", ["ram", "none"])
@pytest.mark.parametrize("stride", [1, 3])
def test_windows_overlap_and_never_cross_a_file(files, small_blocks, residency, stride):
    with feed.hdf5(
        files, ["x", "y"], 16, window=8, stride=stride, residency=residency, num_workers=2, mixing_rows=100
    ) as loader:
        seen = []
        for x, y in loader:
            assert x.shape[1:] == (8, 5)
            start = x[:, 0, 0]
            assert torch.equal(x[:, :, 0], start[:, None] + torch.arange(8))
            assert torch.equal(y, -(start + 7).long())  # the label of the window's last row
            seen += start.int().tolist()
    expected = [*range(0, 250 - 7, stride), *(250 + s for s in range(0, 130 - 7, stride))]
    assert sorted(seen) == expected


def test_overlapping_windows_are_stored_once(files):
    with feed.hdf5(files, ["x"], 16, window=8, window_keys=["x"], num_workers=0) as loader:
        loader.fill()
        assert [tuple(column.shape) for column in loader._kept[0]] == [(380, 5)]
        assert len(loader) == -(-(243 + 123) // 16)


def test_ranks_take_equally_many_batches_and_no_sample_twice(files, small_blocks):
    for residency in ("ram", "none"):
        seen, lengths = [], set()
        for rank in range(3):
            with feed.hdf5(
                files, ["x", "y"], 10, residency=residency, rank=rank, world_size=3, num_workers=0, drop_last=True
            ) as loader:
                batches = list(loader)
                lengths.add(len(batches))
                assert len(batches) == len(loader)
                seen += [int(v) for _, y in batches for v in -y]
        assert len(lengths) == 1
        assert len(seen) - len(set(seen)) <= 2


@pytest.mark.parametrize("seed", [None, "a", 1.5])
def test_a_seed_that_is_none_is_told(files, seed):
    with pytest.raises(UsageError, match="seed is"):
        feed.hdf5(files, ["x"], 16, seed=seed)
    with feed.hdf5(files, ["x"], 16, num_workers=0) as loader, pytest.raises(UsageError, match="whole numbers"):
        loader.begin_at(0, -1)


def test_ranks_above_memory_share_blocks_of_any_size(tmp_path):
    """With fewer blocks than ranks no rank had a batch; with a long and many short files most rows were left out."""
    names = [str(tmp_path / f"{number}.h5") for number in range(3)]
    for number, (name, rows) in enumerate(zip(names, (400, 7, 1), strict=True)):
        with h5py.File(name, "w") as file:
            file["x"] = np.arange(rows) + 1000 * number
    for shuffle, world in ((True, 4), (False, 4), (True, 2)):
        options = {"residency": "none", "shuffle": shuffle, "world_size": world, "num_workers": 0}
        for epoch in range(2):
            seen = []
            for rank in range(world):
                with feed.hdf5(names, "x", 16, rank=rank, **options) as loader:
                    loader.set_epoch(epoch)
                    batches = [batch.tolist() for batch in loader]
                    assert len(batches) == len(loader) == -(-(408 // world) // 16)
                    seen += itertools.chain.from_iterable(batches)
                    loader.begin_at(epoch, 3)
                    assert [batch.tolist() for batch in loader] == batches[3:]
            assert len(seen) == len(set(seen)) == 408


@pytest.mark.parametrize(("window", "stride", "part"), [(None, 1, (0, 1)), (8, 3, (0, 1)), (8, 1, (0.3, 0.9))])
def test_samples_of_the_same_chunks_are_in_one_block(files, window, stride, part):
    source = describe(files, ["x", "y"], window, stride, part)
    blocks = source.blocks(28 * 70)
    assert [block.first_sample for block in blocks] == list(
        itertools.accumulate((block.samples for block in blocks[:-1]), initial=0)
    )
    assert sum(block.samples for block in blocks) == source.samples
    for block in blocks:
        begins = range(block.row, block.row + block.samples * stride, stride)
        assert len({row // 50 for row in begins}) == 1
        assert block.rows == begins[-1] - block.row + (window or 1)
    assert len(source.blocks()) == 2  # one read a file


def test_each_process_opens_its_own_handle(files):
    reader = BlockReader(source := describe(files, ["x"], None, 1), source.blocks())
    row = torch.zeros(1, reader.block_bytes, dtype=torch.uint8)
    assert reader.read(torch.tensor([0]), row, 0) == []
    mine = reader._open[str(files[0])]
    pid = os.fork()
    if pid == 0:
        reader.read(torch.tensor([0]), row, 0)
        os._exit(0 if reader._open[str(files[0])] is not mine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


ROWS = np.random.default_rng(0).integers(-99, 99, (70, 9, 5)).astype("f4")
STORED = {
    "contiguous": {},
    "chunks cut along every axis": {"chunks": (13, 4, 2), "shuffle": True, "compression": "gzip"},
    "lzf": {"chunks": (16, 9, 5), "compression": "lzf"},
    "checksums": {"chunks": (16, 9, 5), "fletcher32": True},
    "big-endian": {"dtype": ">f8", "chunks": (16, 9, 5)},
    "half": {"dtype": "f2", "chunks": (7, 9, 5)},
    "bool": {"dtype": "?", "chunks": (16, 9, 5)},
    "linked from another file": {},
}


@pytest.mark.parametrize("kind", STORED)
def test_rows_are_those_of_the_library_however_stored(kind, tmp_path):
    options = STORED[kind]
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        if "linked" in kind:
            with h5py.File(tmp_path / "other.h5", "w") as other:
                other["y"] = ROWS
            file["x"] = h5py.ExternalLink("other.h5", "y")
        else:
            file.create_dataset("x", data=ROWS.astype(options.get("dtype", "f4")), **options)
    with h5py.File(path, "r") as file:
        expected = file["x"][:]
    for tier in ("ram", "none"):
        with feed.hdf5(path, "x", 10, shuffle=False, num_workers=1, residency=tier, device="cpu") as loader:
            served = torch.cat(list(loader)).numpy()
        assert served.dtype.isnative
        assert np.array_equal(served, expected)


@pytest.mark.parametrize("residency", ["ram", "none"])
def test_two_iterators_at_once_do_not_disturb_each_other(files, small_blocks, residency):
    with feed.hdf5(files, ["x", "y"], 32, residency=residency, num_workers=2, mixing_rows=120) as loader:
        aside = iter(loader)
        seen = [next(aside)]
        for _ in range(2):
            assert sorted(rows_of(loader)) == list(range(380))
        seen += list(aside)
        assert sorted(int(value) for x, _ in seen for value in x[:, 0]) == list(range(380))
        assert sorted(rows_of(loader)) == list(range(380))


def test_samples_are_augmented_by_their_number_in_the_whole(files, small_blocks):
    def by_row(**options):
        def shifted(batch, seed, epoch, samples):
            return batch[0] + uniform(seed, epoch, samples, 1), batch[1]

        with feed.hdf5(files, ["x", "y"], num_workers=0, augment=shifted, **options) as loader:
            return {int(y): row for x, ys in loader for row, y in zip(x, ys, strict=True)}

    left, right = by_row(batch_size=19, residency="none", mixing_rows=90), by_row(batch_size=64, residency="ram")
    assert left.keys() == right.keys()
    assert all(torch.equal(row, right[key]) for key, row in left.items())


@pytest.mark.parametrize("residency", ["ram", "none"])
def test_a_cut_file_is_named_with_its_key(files, residency):
    size = files[0].stat().st_size
    os.truncate(files[0], size // 2)
    with pytest.raises(DataError, match=r"0\.h5"):
        list(feed.hdf5(files, ["x", "y"], 10, residency=residency, num_workers=2))


def test_damage_in_a_chunk_names_file_key_and_rows(files):
    with h5py.File(files[1], "r") as file:
        chunk = file["x"].id.get_chunk_info(1)
    with files[1].open("r+b") as raw:
        raw.seek(chunk.byte_offset)
        raw.write(b"\0" * chunk.size)
    with pytest.raises(DataError, match=r"1\.h5, key x, rows"):
        list(feed.hdf5(files, ["x", "y"], 10, residency="ram", num_workers=2))


def test_a_virtual_data_set_is_refused(tmp_path):
    """Where a source is missing, the library gives zeros, which were trained on."""
    layout = h5py.VirtualLayout((8, 3), "f4")
    layout[:] = h5py.VirtualSource("rows.h5", "x", (8, 3))
    with h5py.File(tmp_path / "all.h5", "w") as file:
        file.create_virtual_dataset("features", layout)
    with pytest.raises(UsageError, match=r"'features' is a virtual data set"):
        feed.hdf5(tmp_path / "all.h5", ["features"], 8)


def test_rows_that_hold_no_value_are_told(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["nothing"] = np.zeros((5, 2)), np.zeros((5, 3, 0))
    for keys in (["nothing"], ["x", "nothing"]):
        with pytest.raises(DataError, match=r"a\.h5: the rows of 'nothing' are empty: its shape is "):
            feed.hdf5(tmp_path / "a.h5", keys, 2)


def test_mistakes_are_told(files, tmp_path):
    with pytest.raises(UsageError, match=r"has no key 'q'"):
        feed.hdf5(files, ["q"], 4)
    with pytest.raises(UsageError, match="does not exist"):
        feed.hdf5(tmp_path / "none.h5", ["x"], 4)
    os.mkfifo(tmp_path / "pipe.h5")
    with pytest.raises(UsageError, match="is not a regular file"):
        feed.hdf5(tmp_path / "pipe.h5", ["x"], 4)
    with pytest.raises(DataError, match="no sample in"):
        feed.hdf5(files, ["x"], 4, window=1000)
    with pytest.raises(UsageError, match="window_keys"):
        feed.hdf5(files, ["x"], 4, window=3, window_keys=["y"])
    with h5py.File(tmp_path / "odd.h5", "w") as file:
        file.create_dataset("nothing", dtype="f4", data=h5py.Empty("f4"))
        file.create_dataset("one", data=3.0)
        file.create_group("group")
    for key in ("nothing", "one", "group"):
        with pytest.raises(UsageError, match="is not an array of rows"):
            feed.hdf5(tmp_path / "odd.h5", key, 4)
    (tmp_path / "text.h5").write_text("no HDF5 at all")
    with pytest.raises(DataError, match="cannot be read as HDF5"):
        feed.hdf5(tmp_path / "text.h5", ["x"], 4)


@pytest.mark.parametrize("seed", [0, 7, 2**63])
def test_no_two_epochs_of_a_small_file_have_one_order(files, seed):
    """The epoch in which the rows arrive was mixed by the seed of the one after it: the second repeated the first."""
    with feed.hdf5(files[0], ["x", "y"], 32, num_workers=0, seed=seed) as loader:
        assert len({tuple(rows_of(loader)) for _ in range(4)}) == 4


@pytest.mark.parametrize("at_once", [0, 10**9])
@pytest.mark.parametrize("window", [None, 1, 7])
def test_gathering_several_batches_at_once_changes_nothing(files, window, at_once, monkeypatch):
    module = importlib.import_module("fulltilt.feed.hdf5")
    monkeypatch.setattr(module, "AT_ONCE_BYTES", at_once)
    with feed.hdf5(files[0], ["x", "y"], 9, window=window, num_workers=0, device="cpu") as loader:
        indices = loader.order.epoch_indices(0)
        batches = list(loader)
    assert [len(y) for _, y in batches] == [len(some) for some in torch.split(indices, 9)]
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert torch.equal(y, -(indices + (window or 1) - 1))
    rows = torch.arange(250.0)[:, None].expand(-1, 5)
    wanted = [rows[start : start + window] if window else rows[start] for start in indices.tolist()]
    assert torch.equal(x, torch.stack(wanted))


def test_rows_asked_for_on_disk_are_streamed_from_their_files(files):
    with feed.hdf5(files, ["x"], 32, residency="disk") as loader:
        assert loader.tier == "none"


def test_a_batch_on_the_cpu_holds_its_own_memory_alone(files):
    with feed.hdf5(files, "x", 16, num_workers=0, device="cpu", residency="ram") as loader:
        batch = next(iter(loader))
    assert batch.untyped_storage().nbytes() == batch.nbytes
