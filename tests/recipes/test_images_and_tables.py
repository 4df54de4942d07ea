"""Files as people have them: pictures of other depths, masks of class numbers, tables with other delimiters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fulltilt.errors import DataError
from fulltilt.recipes import tables
from fulltilt.recipes.images import as_mask, as_rgb, opened


def saved(folder: Path, values: np.ndarray, name: str = "a.png") -> Path:
    Image.fromarray(values).save(folder / name)
    return folder / name


@pytest.mark.parametrize("kind", [np.uint16, np.int32, np.float32])
def test_a_picture_of_more_than_eight_bits_is_refused(kind: type, tmp_path: Path) -> None:
    """Pillow would clip it at 255: white, or black where its values end at 1."""
    path = saved(tmp_path, np.linspace(0, 60_000, 60 * 80).astype(kind).reshape(60, 80), "a.tif")
    with pytest.raises(DataError, match=r"a\.tif: its pixels have more than 8 bits"), opened(path) as picture:
        as_rgb(picture)


@pytest.mark.parametrize("stored", ["RGB", "P", "RGBA"])
def test_every_colour_of_a_mask_is_inside(stored: str, tmp_path: Path) -> None:
    """Seen to fail: beside a bright object the dark red one was taken for background."""
    values = np.zeros((60, 80, 3), np.uint8)
    values[10:20], values[30:40], values[50:55] = (128, 0, 0), (255, 255, 255), (0, 0, 90)
    Image.fromarray(values).convert(stored).save(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as opened:
        assert (np.asarray(as_mask(opened)) > 127).mean() == pytest.approx(25 / 60)


@pytest.mark.parametrize("kind", ["0 and 255", "0 and 1", "numbers of objects", "one bit", "sixteen bits", "JPEG"])
def test_a_mask_means_the_same_however_it_is_stored(kind: str, tmp_path: Path) -> None:
    inside = np.zeros((60, 80), bool)
    inside[20:40, 20:50] = True
    values = {
        "0 and 1": inside.astype(np.uint8),
        "numbers of objects": inside * np.uint8(7),
        "one bit": inside,
        "sixteen bits": inside * np.uint16(65535),
    }.get(kind, inside * np.uint8(255))
    with Image.open(saved(tmp_path, values, "a.jpg" if kind == "JPEG" else "a.png")) as opened:
        found = np.asarray(as_mask(opened)) > 127
    assert (found == inside).mean() > 0.99


def test_a_mask_without_anything_stays_empty(tmp_path: Path) -> None:
    for name in ("a.png", "a.jpg"):
        with Image.open(saved(tmp_path, np.full((16, 16), 3 if name == "a.jpg" else 0, np.uint8), name)) as opened:
            assert not (np.asarray(as_mask(opened)) > 127).any()


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_table_is_split_by_the_delimiter_of_its_header(delimiter: str, encoding: str, tmp_path: Path) -> None:
    header, row = delimiter.join(["text ", " label"]), delimiter.join(['"a, b; c"', "1"])
    (tmp_path / "a.csv").write_bytes(f"{header}\r\n{row}\r\n".encode(encoding))
    columns, rows = tables.read(tmp_path / "a.csv", ("text", "label"))
    assert (columns, rows) == (["text", "label"], [(2, {"text": "a, b; c", "label": "1"})])


def test_a_blank_behind_a_delimiter_is_no_part_of_a_value(tmp_path: Path) -> None:
    """Seen to fail: a quote behind it did not quote, and a path began with it."""
    (tmp_path / "a.csv").write_text('"text", "label"\n"a, b", 1\nc,  2\n')
    _, rows = tables.read(tmp_path / "a.csv", ("text", "label"))
    assert [row for _, row in rows] == [{"text": "a, b", "label": "1"}, {"text": "c", "label": "2"}]


@pytest.mark.parametrize("lines", ["a;1\nb;c;0", "a;b;1\nc;0"], ids=["in a later line", "in the first line"])
def test_a_text_with_a_delimiter_and_no_quotes_is_refused(lines: str, tmp_path: Path) -> None:
    """Seen to fail: the end of the text was taken for its label."""
    (tmp_path / "a.csv").write_text(f"text;label\n{lines}\n")
    with pytest.raises(DataError, match=r"a\.csv, line 3: a line of 3 values among others of 2"):
        tables.read(tmp_path / "a.csv", ("text", "label"))
    (tmp_path / "a.csv").write_text("text;label\na;1;\nb;0\nc;1; ;\n")
    _, rows = tables.read(tmp_path / "a.csv", ("text", "label"))
    assert [row["label"] for _, row in rows] == ["1", "0", "1"], "values of nothing do no harm"


def test_a_damaged_picture_is_named_whatever_pillow_raises(tmp_path: Path) -> None:
    path = saved(tmp_path, np.zeros((4, 4), np.uint8))
    with pytest.raises(DataError, match=r"cannot read .*a\.png"), opened(path):
        raise TypeError("an integer is required")  # of a damaged TIFF
