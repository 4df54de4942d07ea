"""Made cars: the same for the same seed, in the recipe's own format, with looks that can be told apart."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from fulltilt.recipes.carclip.data import read
from fulltilt.recipes.synthetic import make_folder
from fulltilt.recipes.synthetic.cars import BODIES, COLOURS, MAKES, Look, described, picture


def test_the_same_seed_gives_the_same_files(tmp_path: Path) -> None:
    def digest(folder: Path) -> dict[str, str]:
        files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name[0] != ".")
        return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert make_folder("cars", tmp_path / name, 30, seed)
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    assert digest(tmp_path / "a") != digest(tmp_path / "c")
    pictures = read(tmp_path / "a", 0.1)
    assert len(pictures) == 30
    assert all(each.path.is_file() and each.caption for each in pictures)
    folders = {each.path.relative_to(tmp_path / "a").parts[:3] for each in pictures}
    assert folders == {each.car[:3] for each in pictures}


def test_captions_tell_what_is_seen() -> None:
    for index in range(200):
        look, row = described(3, index)
        assert all(row[word] in row["caption"] for word in ("make", "model", "year", "colour"))
        assert (look.body, look.colour) == (row["body"], row["colour"])
        assert list(MAKES)[look.make] == row["make"]


def test_every_part_of_a_look_shows() -> None:
    """The same street with one thing changed is another picture."""

    def drawn(look: Look) -> np.ndarray:  # type: ignore[type-arg]
        return np.asarray(picture(look, np.random.default_rng(4))).astype(int)

    plain = Look("saloon", "red", 0, 0, 0)
    others = [
        *(Look(body, "red", 0, 0, 0) for body in BODIES if body != "saloon"),
        *(Look("saloon", colour, 0, 0, 0) for colour in COLOURS if colour != "red"),
        *(Look("saloon", "red", make, 0, 0) for make in range(1, len(MAKES))),
        *(Look("saloon", "red", 0, 0, year) for year in range(1, 5)),
    ]
    pictures = [drawn(look) for look in (plain, *others)]
    for place, first in enumerate(pictures):
        for second in pictures[place + 1 :]:
            assert (np.abs(first - second) > 40).sum() > 100
