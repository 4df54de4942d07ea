"""Files as people have them: pictures of other depths, masks of class numbers, tables with other delimiters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fulltilt.recipes import tables
from fulltilt.recipes.pixels import as_mask, as_rgb


def saved(folder: Path, values: np.ndarray, name: str = "a.png") -> Path:
    Image.fromarray(values).save(folder / name)
    return folder / name


def test_a_picture_of_sixteen_bits_is_scaled_and_not_cut_off(tmp_path: Path) -> None:
    values = np.linspace(0, 65535, 60 * 80).astype(np.uint16).reshape(60, 80)
    with Image.open(saved(tmp_path, values)) as opened:
        found = np.asarray(as_rgb(opened))
    assert found.shape == (60, 80, 3)
    assert (found.min(), found.max()) == (0, 255)
    assert abs(float(found.mean()) - 127.5) < 1


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
    with tables.opened(tmp_path / "a.csv", ("text", "label")) as rows:
        assert list(rows) == [{"text": "a, b; c", "label": "1"}]
