"""Folders and tables of cars, their splits, their mistakes, and what a picture becomes."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from PIL import Image

from fulltilt.errors import DataError, FulltiltError, UsageError
from fulltilt.recipes.carclip import CarClipOptions
from fulltilt.recipes.carclip.data import (
    CarPictures,
    CarViews,
    Picture,
    captions_of,
    decoded,
    read,
    read_templates,
)
from fulltilt.recipes.carclip.trainer import check, check_options
from fulltilt.recipes.images import sizes
from fulltilt.recipes.recipe import Request
from fulltilt.train.config import TrainSettings


def put(path: Path, size: tuple[int, int] = (40, 30), colour: str = "red") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    return path


@pytest.fixture
def garage(tmp_path: Path) -> Path:
    for number in range(40):
        put(tmp_path / "cars" / f"Make_{number % 4}" / "One" / str(2000 + number % 3) / f"{number}.jpg")
    return tmp_path / "cars"


def table_of(path: Path, rows: Sequence[dict[str, str]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    return path


def request(data: Path, **options: object) -> Request:
    engine = [name for name in ("drop_last", "batch_size", "fsdp") if name in options]
    given = {"drop_last": True} | {name: options.pop(name) for name in engine}
    settings = TrainSettings(**given)  # type: ignore[arg-type]
    return Request(CarClipOptions(**options), settings, data, data.parent / "out")  # type: ignore[arg-type]


def checked(asked: Request) -> None:
    check_options(asked)
    check(asked)


def words(error: FulltiltError) -> str:
    text = str(error)
    assert len(text.splitlines()) <= 2, "what, and what to change"
    return text


# --------------------------------------------------------------------------- reading


def test_folders_are_make_model_and_year(garage: Path) -> None:
    pictures = read(garage, 0.2)
    assert len(pictures) == 40
    assert {picture.car for picture in pictures} == {
        (f"Make {make}", "One", str(2000 + year)) for make in range(4) for year in range(3)
    }
    assert all(picture.caption is None for picture in pictures)
    assert {"train", "val"} == {picture.split for picture in pictures}


def test_a_picture_stays_on_its_side_when_others_come(garage: Path) -> None:
    before = {picture.path: picture.split for picture in read(garage, 0.2)}
    assert 2 <= sum(split == "val" for split in before.values()) <= 16
    put(garage / "Make_9" / "Two" / "2020" / "new.png")
    after = {picture.path: picture.split for picture in read(garage, 0.2)}
    assert before.items() <= after.items()


def test_the_datas_own_split_counts(garage: Path) -> None:
    for side in ("train", "val"):
        for number in range(3):
            put(garage.parent / "own" / side / "A" / "B" / "2001" / f"{number}.jpg")
    pictures = read(garage.parent / "own", 0.5)
    assert [picture.split for picture in pictures] == ["train"] * 3 + ["val"] * 3
    assert {picture.car for picture in pictures} == {("A", "B", "2001")}


def test_a_table_gives_captions_cars_and_split(tmp_path: Path) -> None:
    car = {"make": "Kia", "model": "Rio", "year": "2011"}
    rows = [
        {"image": f"{n}.jpg", "caption": f"a {c} car, number {n}", **car, "colour": c, "split": s}
        for n, (c, s) in enumerate([("red", "train"), ("red", "train"), ("blue", "validation"), ("green", "test")])
    ]
    pictures = read(table_of(tmp_path / "list.csv", rows), 0.5)
    assert pictures[0].path == tmp_path / "0.jpg"
    assert pictures[0].caption == "a red car, number 0"
    assert pictures[0].car == pictures[1].car != pictures[2].car, (
        "what agrees in make, model, year and colour is the same car"
    )
    assert [picture.split for picture in pictures] == ["train", "train", "val", "val"]


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (
            [{"picture": "a.jpg", "caption": "x"}],
            "no column image; its columns are: picture, caption",
        ),
        ([{"image": "a.jpg", "words": "x"}], "no column caption"),
        ([{"image": "a.jpg", "caption": " "}], "line 2 of"),
        ([{"image": "a.jpg", "caption": "x", "split": "later"}], "split is 'later'"),
        ([{"image": "a.jpg", "caption": "x"}] * 2, "fewer than 2"),
    ],
)
def test_a_wrong_table_is_told_in_words(rows: list[dict[str, str]], told: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read(table_of(tmp_path / "list.csv", rows), 0.5)
    assert told in words(caught.value)


def test_what_is_wrong_is_told_before_training(garage: Path, tmp_path: Path) -> None:
    check(request(garage))
    cases: list[tuple[type[FulltiltError], Request, str]] = [
        (DataError, request(tmp_path / "nowhere"), "there is no folder or CSV"),
        (UsageError, request(garage, model="smal"), "did you mean small?"),
        (UsageError, request(garage, model="openai/clip-vit-base-patch32", image_size=64), "has a size of its own"),
        (UsageError, request(garage, model="./nowhere"), "the model's folder ./nowhere does not exist"),
        (UsageError, request(garage, drop_last=False), "drop_last: false"),
        (UsageError, request(garage, fsdp=True), "carclip does not go with fsdp"),
        (UsageError, request(garage, batch_size=1), "compares a picture with its own caption alone"),
        (UsageError, request(garage, templates=str(tmp_path / "none.txt")), "caption templates"),
    ]
    same = [{"image": f"{n}.jpg", "caption": "a car", "split": "val" if n > 4 else "train"} for n in range(9)]
    alike = table_of(tmp_path / "alike.csv", same)
    cases.append((DataError, request(alike), "said to show the same car (a car)"))
    (tmp_path / "empty").mkdir()
    cases.append((DataError, request(tmp_path / "empty"), "holds no images"))
    for kind, asked, told in cases:
        with pytest.raises(kind) as caught:
            checked(asked)
        assert told in words(caught.value)
    (garage / "Make_0" / "One" / "2000" / "broken.jpg").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"broken\.jpg: it is not an image"):
        check(request(garage))
    put(garage / "lost.jpg")
    with pytest.raises(DataError, match="does not lie in a folder make/model/year"):
        check(request(garage))


def test_a_line_with_a_value_too_many_and_a_systems_own_files_do_no_harm(garage: Path) -> None:
    (garage / "Make_0" / "One" / "2000" / "._0.jpg").write_bytes(b"of a Mac")
    assert len(read(garage, 0.2)) == 40
    lines = "".join(f"{n}.jpg;a car, number {n};web;more\n" for n in range(40))
    (garage / "list.csv").write_text(f"image;caption;source\n{lines}")
    pictures = read(garage / "list.csv", 0.5)
    assert pictures[0].caption == "a car, number 0"
    assert len({picture.car for picture in pictures}) == 40, "a column that is alike everywhere makes them no one car"


def test_missing_pictures_are_counted(tmp_path: Path) -> None:
    pictures = [Picture(tmp_path / f"{n}.jpg", "x", ("x",), "train") for n in range(3)]
    with pytest.raises(DataError, match=r"0\.jpg is not there \(and 2 more\)"):
        sizes(picture.path for picture in pictures)


def test_templates_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "templates.txt"
    file.write_text("# mine\n{make}!\n\nthe {model} of {year}\n")
    assert read_templates(str(file)) == ("{make}!", "the {model} of {year}")
    picture = Picture(tmp_path, None, ("Alder", "Pico", "2005"), "train")
    assert captions_of(picture, ("{make}!", "the {model} of {year}")) == ("Alder!", "the Pico of 2005")
    file.write_text("a {colour} {make}")
    with pytest.raises(UsageError, match=r"Use \{make\}, \{model\} and \{year\}"):
        read_templates(str(file))


# --------------------------------------------------------------------------- samples


def lengths(captions: list[str]) -> torch.Tensor:
    return torch.tensor([[len(caption), 7] for caption in captions], dtype=torch.int32)


def test_a_picture_is_scaled_and_cut_from_the_middle(tmp_path: Path) -> None:
    path = put(tmp_path / "wide.png", (90, 30), "blue")
    with Image.open(path) as opened:
        wide = opened.copy()
    wide.paste((255, 0, 0), (0, 0, 30, 30))
    wide.save(path)
    pixels = decoded(path, 16)
    assert pixels.shape == (3, 16, 16)
    assert pixels.dtype == torch.uint8
    assert pixels[2].min() > 200, "the red third on the left is cut off"
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(DataError, match=r"wide\.png"):
        decoded(path, 16)


def test_captions_take_turns_and_views_depend_on_epoch_and_sample_only(garage: Path) -> None:
    pictures = read(garage, 0.2)
    samples = CarPictures(pictures, 32, ("{make}", "a {make} {model}"), lengths)
    first = samples[0]
    assert first["tokens"].tolist() == [[6, 7], [12, 7]]
    batch = {name: torch.stack([samples[i][name] for i in (0, 1, 2)]) for name in first}
    views = CarViews(32, augment=True)
    taken = [views(batch, 0, epoch, torch.tensor([0, 1, 2])) for epoch in (0, 1, 2)]
    assert [view["tokens"][:, 0].tolist() for view in taken[:2]] == [[6, 12, 6], [12, 6, 12]]
    assert not torch.equal(taken[0]["image"], taken[2]["image"])
    alone = views({name: rows[1:2] for name, rows in batch.items()}, 0, 1, torch.tensor([1]))
    torch.testing.assert_close(alone["image"][0], taken[1]["image"][1])
    still = CarViews(32, augment=False)(batch, 0, 0, torch.tensor([0, 1, 2]))
    assert torch.equal(still["image"], batch["image"])
