"""Made cars: makes, models, years and paints, in folders ``make/model/year`` with a table of captions."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from fulltilt.recipes.synthetic.car_pictures import BODIES, COLOURS, Look, picture
from fulltilt.recipes.synthetic.parallel import spread

CAPTIONS = "captions.csv"
COLUMNS = ("image", "caption", "make", "model", "year", "colour", "body", "split")
VAL_SHARE = 0.15
# Make → models. What a make looks like follows from its place in this list.
MAKES = {
    "Alder": ("Comet", "Fjord", "Meridian", "Pico"),
    "Brava": ("Corsair", "Delta", "Lumen", "Tramontana"),
    "Castor": ("Atlas", "Breeze", "Kestrel", "Rover"),
    "Dorado": ("Caravel", "Mistral", "Nomad", "Sprint"),
    "Elmwood": ("Cargo", "Heron", "Ridge", "Vesper"),
    "Ferrum": ("Anvil", "Flint", "Forge", "Spark"),
    "Gallant": ("Baron", "Page", "Squire", "Templar"),
    "Halcyon": ("Azure", "Drift", "Lagoon", "Tern"),
    "Ibex": ("Cliff", "Gorge", "Scree", "Summit"),
    "Juno": ("Aria", "Ballad", "Cantata", "Waltz"),
    "Kodiak": ("Denali", "Taiga", "Tundra", "Yukon"),
    "Lyra": ("Altair", "Deneb", "Sirius", "Vega"),
}
YEARS = (2005, 2010, 2015, 2020, 2025)
PHRASES = (
    "a photo of a {colour} {year} {make} {model}",
    "a {colour} {make} {model} {body} from {year}",
    "a {year} {make} {model}, a {body} in {colour}",
    "{colour} {body}: {make} {model}, {year}",
    "this {make} {model} of {year} is {colour}",
)


def make(folder: Path, size: int, seed: int) -> Iterator[int]:
    """Write ``size`` pictures and ``captions.csv`` into ``folder``; yields the number of pictures done."""
    with (folder / CAPTIONS).open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        for index in range(size):
            _, row = described(seed, index)
            (folder / row["image"]).parent.mkdir(parents=True, exist_ok=True)
            table.writerow(row)
    yield from spread(partial(_write_pictures, folder, seed), size)


def described(seed: int, index: int) -> tuple[Look, dict[str, str]]:
    """Any car, each as likely as any other, and its row of the table."""
    rng = np.random.default_rng((seed, index))
    make, model, year, colour = (int(rng.integers(count)) for count in (len(MAKES), 4, len(YEARS), len(COLOURS)))
    words = _words(make, model, year, colour)
    place = f"{words['make']}/{words['model']}/{words['year']}/{index:06d}.jpg"
    caption = PHRASES[rng.integers(len(PHRASES))].format(**words)
    split = "val" if rng.random() < VAL_SHARE else "train"
    look = Look(words["body"], words["colour"], make, model, year)
    return look, {"image": place, "caption": caption, **words, "split": split}


def _write_pictures(folder: Path, seed: int, piece: range) -> None:
    for index in piece:
        look, row = described(seed, index)
        picture(look, np.random.default_rng((seed, index, 1))).save(folder / row["image"], quality=88)


def _words(make: int, model: int, year: int, colour: int) -> dict[str, str]:
    name = list(MAKES)[make]
    # Every body is built by several makes, and no make builds only one.
    body = list(BODIES)[(3 * make + 2 * model + model // 2) % len(BODIES)]
    label = {"make": name, "model": MAKES[name][model], "year": str(YEARS[year])}
    return {**label, "colour": list(COLOURS)[colour], "body": body}
