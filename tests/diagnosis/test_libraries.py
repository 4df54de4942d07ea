"""Fixes are written as the users of a library would write them."""

from __future__ import annotations

import pytest

from fulltilt.diagnosis.libraries import LIBRARIES, costly_call, library_of, loader_call, setting_name
from fulltilt.records import HotLine
from tests.diagnosis.examples import loader


@pytest.mark.parametrize(
    ("library", "written"),
    [
        ("transformers", "TrainingArguments(..., dataloader_num_workers=4, dataloader_persistent_workers=True)"),
        ("ultralytics", "model.train(..., workers=4)"),
        ("skorch", "NeuralNet(..., iterator_train__num_workers=4, iterator_train__persistent_workers=True)"),
        ("timm", "create_loader(..., num_workers=4, persistent_workers=True)"),
        ("keras", "super().__init__(workers=4, use_multiprocessing=True) in the PyDataset that makes the batches"),
        ("unknown", None),
    ],
)
def test_settings_are_written_in_the_librarys_words(library: str, written: str | None) -> None:
    assert loader_call(library, {"num_workers": 4, "persistent_workers": True}) == written


def test_the_setting_for_workers_has_the_librarys_name() -> None:
    assert setting_name(loader(made_by="ultralytics"), "num_workers") == "workers"
    assert setting_name(loader(made_by=None), "num_workers") == "num_workers"


def test_a_line_inside_of_a_library_is_known() -> None:
    line = HotLine("ultralytics/utils/patches.py:238", "torch_save", 1.0)
    assert library_of(line) is LIBRARIES["ultralytics"]
    assert library_of(HotLine("train.py:3", "main", 1.0)) is None


@pytest.mark.parametrize(
    ("function", "call", "inside", "does"),
    [
        ("D.__getitem__", "self.file['x'][i]", "h5py/_hl/dataset.py:Dataset.__getitem__", "reads HDF5"),
        (
            "D.__getitem__",
            "Image.open(p).convert('RGB')",
            "PIL/Image.py:Image.convert PIL/ImageFile.py:ImageFile.load",
            "decodes a whole image file",
        ),
        ("load", "cv2.imread(path)", None, "decodes a whole image file"),
        (
            "D.__getitem__",
            "np.load(p)['x']",
            "numpy/lib/_npyio_impl.py:NpzFile.__getitem__ numpy/lib/_format_impl.py:_read_bytes",
            "unpacks a whole array",
        ),
        (
            "D.__getitem__",
            "self.table.iloc[i]",
            "pandas/core/indexing.py:_LocationIndexer.__getitem__ pandas/core/internals/managers.py:fast_xs",
            "takes a row",
        ),
        ("D.__getitem__", "pd.read_csv(p)", "pandas/io/parsers/readers.py:read_csv", "parses a file"),
        ("D.__getitem__", "json.load(f)", "json/__init__.py:load", "parses text"),
        ("D.__getitem__", "pickle.load(f)", None, "unpickles all objects"),
        ("D.__getitem__", "self.tokenizer(text, truncation=True)", None, "tokenizes one text"),
        (
            "D.__getitem__",
            "requests.get(url)",
            "requests/api.py:get urllib3/connection.py:request",
            "asks over the net",
        ),
        (
            "D.__getitem__",
            "zipfile.ZipFile(ZIP)",
            "zipfile.py:ZipFile.__init__",
            "opens a file and reads",
        ),
        (
            "D.__getitem__",
            "h5py.File(self.path)",
            "h5py/_hl/files.py:File.__init__",
            "opens a file and reads",
        ),
        ("D.__getitem__", "archive.read(name)", "zipfile.py:ZipFile.read", "decompresses"),
        ("my_collate", "tokenizer(texts)", None, None),
        ("D.__getitem__", "image.resize((64, 64))", "PIL/Image.py:Image.resize", None),
        ("D.__getitem__", "tokens.astype(int)", None, None),
        ("D.__getitem__", "np.load(p)", "numpy/lib/_npyio_impl.py:load", None),
    ],
)
def test_what_makes_a_call_of_a_library_expensive_is_known(
    function: str, call: str, inside: str | None, does: str | None
) -> None:
    known = costly_call(HotLine("data.py:9", function, 1.0, call, inside=inside))
    assert (known is None) == (does is None)
    assert known is None or known.does.startswith(str(does))
