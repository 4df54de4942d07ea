"""Finding the files, and what is said about those that cannot be used."""

from __future__ import annotations

import resource
from pathlib import Path

import h5py
import numpy as np
import pytest

from fulltilt.errors import DataError, FulltiltError, MachineError, UsageError
from fulltilt.recipes.hdf5 import Hdf5Options
from fulltilt.recipes.hdf5.data import read_folder
from fulltilt.recipes.synthetic import hdf5 as synthetic
from fulltilt.recipes.synthetic import make_folder
from fulltilt.store.owned_folder import MARKER


def write(path: Path, rows: int = 40, shape: tuple[int, ...] = (8, 3), **keys: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file["features"] = np.zeros((rows, *shape), "f4")
        file["labels"] = np.arange(rows) % 2
        for key, value in keys.items():
            if key in file:
                del file[key]
            file[key] = value
    return path


@pytest.mark.parametrize(
    ("files", "train", "validation"),
    [
        (["a.h5", "val.h5"], ["a.h5"], ["val.h5"]),
        (["train/a.h5", "train/b.h5", "valid/c.h5"], ["train/a.h5", "train/b.h5"], ["valid/c.h5"]),
        (["REC1.H5", "Test_2.HDF5"], ["REC1.H5"], ["Test_2.HDF5"]),
        (["value.h5", "b.h5"], None, None),
        (["val-1.h5"], None, None),
    ],
)
def test_files_called_val_or_test_are_held_out(
    tmp_path: Path, files: list[str], train: list[str] | None, validation: list[str] | None
) -> None:
    for name in files:
        write(tmp_path / name)
    found = read_folder(tmp_path, Hdf5Options(val_share=0.25))
    shown = [[str(p.relative_to(tmp_path)) for p in part.files] for part in (found.train, found.validation)]
    if train is None:
        assert shown == [sorted(files)] * 2
        assert (found.train.rows, found.validation.rows) == ((0.0, 0.75), (0.75, 1.0))
    else:
        assert shown == [train, validation]
        assert found.train.rows == found.validation.rows == (0.0, 1.0)


def test_labels_are_counted_over_the_rows_that_train(tmp_path: Path) -> None:
    write(tmp_path / "one.h5", labels=np.array([1] * 10 + [0] * 20 + [1] * 10))
    found = read_folder(tmp_path, Hdf5Options(val_share=0.25))
    assert (found.positives, found.negatives, found.pos_weight) == (10, 20, 2.0)


def test_several_keys_and_long_recordings(tmp_path: Path) -> None:
    write(tmp_path / "a.h5", more=np.zeros((40, 8, 2), "f2"))
    assert read_folder(tmp_path, Hdf5Options(features="features, more")).feature_count == 5
    write(tmp_path / "a.h5", shape=(3,))
    assert read_folder(tmp_path, Hdf5Options(window=5, stride=2, val_share=0.3)).feature_count == 3


def test_mistakes_are_told_with_file_key_and_row(tmp_path: Path) -> None:
    def told(kind: type[FulltiltError], path: Path = tmp_path, **options: object) -> str:
        with pytest.raises(kind) as caught:
            read_folder(path, Hdf5Options(**options))  # type: ignore[arg-type]
        text = str(caught.value)
        assert len(text.splitlines()) <= 3
        return text

    assert "does not exist" in told(DataError, tmp_path / "nowhere")
    assert "holds no HDF5 file" in told(DataError)
    file = write(tmp_path / "a.h5")
    text = told(UsageError, features="mfcc")
    assert f"{file} has no key 'mfcc'" in text
    assert "It has: features, labels" in text
    write(file, labels=np.array([0, 1] * 16 + [0, 7] + [0, 1] * 3))
    assert f"{file}: labels[33] is 7, outside the classes 0 and 1" in told(DataError)
    write(file, labels=np.zeros(40))
    assert "no training label" in told(DataError)
    write(file, labels=np.zeros((40, 2)))
    assert "not one label a row" in told(DataError)
    write(file, shape=(3,))
    text = told(DataError)
    assert "[rows, 3], not [windows, time, features]" in text
    assert "set window" in text
    write(file, more=np.zeros((40, 9, 2)))
    assert "differ in their number of time steps" in told(DataError, features="features,more")
    write(file, features=np.zeros((40, 8, 3), "c8"))
    assert "holds complex numbers" in told(DataError)
    write(file, features=h5py.ExternalLink("gone.h5", "/features"))
    assert "links to a missing one" in told(DataError)
    for empty in ((0, 3), (8, 0)):
        write(file, shape=empty)
        shape = str((40, *empty))
        assert f"the rows of 'features' are empty: its shape is {shape}" in told(DataError)
    write(file)
    other = write(tmp_path / "val.h5", shape=(8, 4))
    assert f"{other}: 'features' has rows of [8, 4], but [8, 3] in {file}" in told(DataError)
    other.unlink()
    (tmp_path / "._a.h5").write_bytes(b"of a system's own")
    other.symlink_to("gone.h5")
    assert f"{other} does not exist" in told(UsageError)
    other.unlink()
    assert "no sample in 0 of 40 rows" in told(DataError, val_share=0.001)
    file.write_bytes(b"not HDF5")
    assert "cannot be read as HDF5" in told(DataError)


def test_made_windows_are_the_same_for_the_same_seed_and_hold_both_classes(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two", "other")]
    for folder, seed in zip(folders, (1, 1, 2), strict=True):
        folder.mkdir()
        assert len(list(synthetic.make(folder, 101, seed))) == 101
    contents = [
        {path.name: (h5py.File(path)["features"][:], h5py.File(path)["labels"][:]) for path in sorted(folder.iterdir())}
        for folder in folders
    ]
    assert [*contents[0]] == ["train-0.h5", "train-1.h5", "train-2.h5", "val-0.h5"]
    assert sum(len(labels) for _, labels in contents[0].values()) == 101
    for name, (features, labels) in contents[0].items():
        assert features.shape[1:] == (64, 16)
        assert np.array_equal(features, contents[1][name][0])
        assert np.array_equal(labels, contents[1][name][1])
        assert not np.array_equal(features, contents[2][name][0])
    assert 0.05 < np.concatenate([labels for _, labels in contents[0].values()]).mean() < 0.35


def test_a_limit_on_the_size_of_files_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    """Seen to fail: what waited in the library's cache could not be written at exit, and the process crashed there."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    try:
        with pytest.raises(MachineError, match=r"data: File too large\nRaise the limit on the size of files"):
            make_folder("hdf5", tmp_path / "data", 4000, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in (tmp_path / "data").iterdir()] == [MARKER]


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (np.array(["yes", "no"] * 20, dtype=h5py.string_dtype()), "'labels' holds strings"),
        (np.array([b"0", b"1"] * 20), "'labels' holds strings"),
        (np.zeros(40, dtype=[("left", "f4"), ("right", "f4")]), "'labels' holds records of left, right"),
    ],
)
def test_what_is_no_number_is_named_with_what_to_do(labels: object, told: str, tmp_path: Path) -> None:
    """Seen to fail: "holds object, which torch does not have", and no remedy."""
    path = write(tmp_path / "a.h5", labels=labels)
    with pytest.raises(DataError, match=told) as raised:
        read_folder(tmp_path, Hdf5Options())
    assert str(path) in raised.value.what
    assert raised.value.remedy


def test_rows_of_differing_length_and_groups_are_named(tmp_path: Path) -> None:
    with h5py.File(write(tmp_path / "a.h5"), "a") as file:
        file.create_dataset("ragged", (40,), dtype=h5py.vlen_dtype(np.float32))
        file["all/x"] = np.zeros((40, 8, 3))
    with pytest.raises(DataError, match="'ragged' holds rows of differing length"):
        read_folder(tmp_path, Hdf5Options(features="ragged"))
    with pytest.raises(UsageError, match="'all' is not an array of rows, but a group") as raised:
        read_folder(tmp_path, Hdf5Options(features="all"))
    assert raised.value.remedy == "It holds: all/x."


def test_files_that_differ_are_told_apart(tmp_path: Path) -> None:
    write(tmp_path / "a.h5")
    write(tmp_path / "b.h5", features=np.zeros((40, 8, 3), "f8"))
    with pytest.raises(DataError, match=r"rows of 'features' are float64\[8, 3\], but float32\[8, 3\] in .*a\.h5"):
        read_folder(tmp_path, Hdf5Options())
