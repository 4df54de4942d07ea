"""Synthetic cars: makes, models, years and paints, in folders ``make/model/year`` with a table of captions.

Pictures are side views. The make shows in the badge, the model in body and proportions, the year in the lamps. Street,
light, distance and direction change from picture to picture and mean nothing.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageColor, ImageDraw

from fulltilt.recipes.synthetic import in_processes

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

IMAGE_PX = 224
# Drawn at twice the size and averaged: smooth edges, and a slanted line is told from a straight one.
FINER = 2

Point = tuple[float, float]
Rgb = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Look:
    """What is seen of a car: body and paint by name, make, model and year by their place in the tables."""

    body: str
    colour: str
    make: int
    model: int
    year: int


# Length and height, and the cabin on the lower half: its ends at the bottom and the roof's, rear at 0 and front at 1.
BODIES = {
    "saloon": (1.0, 0.29, 0.17, 0.73, 0.31, 0.58),
    "hatchback": (0.84, 0.31, 0.05, 0.74, 0.15, 0.55),
    "estate": (1.02, 0.3, 0.0, 0.75, 0.03, 0.6),
    "coupe": (0.94, 0.25, 0.12, 0.74, 0.42, 0.55),
    "suv": (0.95, 0.38, 0.0, 0.74, 0.03, 0.62),
    "pickup": (1.08, 0.35, 0.4, 0.77, 0.43, 0.66),
    "van": (1.0, 0.42, 0.0, 0.88, 0.0, 0.7),
    "cabriolet": (0.92, 0.24, 0.57, 0.74, 0.6, 0.63),
}
COLOURS = ("red", "blue", "green", "yellow", "orange", "purple", "brown", "white", "black", "silver")


def make(folder: Path, size: int, seed: int) -> Iterator[int]:
    """Write ``size`` pictures and ``captions.csv`` into ``folder``; yields once for each picture."""
    with (folder / CAPTIONS).open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        for index in range(size):
            _, row = described(seed, index)
            (folder / row["image"]).parent.mkdir(parents=True, exist_ok=True)
            table.writerow(row)
    yield from in_processes(partial(_write_pictures, folder, seed), size)


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
    return {**label, "colour": COLOURS[colour], "body": body}


# --------------------------------------------------------------------------- pictures


def picture(car: Look, rng: np.random.Generator) -> Image.Image:
    """The car on some street."""
    side = IMAGE_PX * FINER
    image = Image.new("RGB", (side, side))
    pen = ImageDraw.Draw(image)
    ground = side * rng.uniform(0.62, 0.74)
    _street(pen, rng, side, ground)
    _car(pen, car, rng, side, ground)
    if rng.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return _weather(image.reduce(FINER), rng)


def _street(pen: ImageDraw.ImageDraw, rng: np.random.Generator, side: int, ground: float) -> None:
    sky, road = rng.integers(90, 250, 3), int(rng.integers(60, 170))
    pen.rectangle((0, 0, side, ground), fill=_rgb(sky))
    pen.rectangle((0, ground - 0.06 * side, side, side), fill=(road, road, road - int(rng.integers(0, 12))))


def _weather(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    light = rng.uniform(0.7, 1.15)
    grain = rng.integers(-14, 15, (IMAGE_PX, IMAGE_PX), dtype=np.int16)
    pixels = np.asarray(image) * np.float32(light) + grain[:, :, None]
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def _rgb(values: Any) -> Rgb:
    red, green, blue = (int(value) for value in values)
    return red, green, blue


def _car(pen: ImageDraw.ImageDraw, car: Look, rng: np.random.Generator, side: int, ground: float) -> None:
    """One car on the canvas, seen from its right side: body, cabin, lamps, wheels, badge."""
    length, height, rear, front, roof_rear, roof_front = BODIES[car.body]
    scale = side * rng.uniform(0.72, 0.86)
    # Two models with the same body differ in proportion.
    length *= scale * (0.94 + 0.04 * (car.model % 3))
    height *= scale * (0.92 + 0.05 * ((car.make + car.model) % 4))
    left = rng.uniform(0.02, 0.98 - length / side) * side
    wheel = scale * 0.085 * (1.2 if car.body in ("suv", "pickup") else 1.0)
    paint = _rgb(np.clip(np.array(ImageColor.getrgb(car.colour)) + rng.uniform(-12, 12, 3), 0, 255))

    def at(x: float, y: float) -> Point:
        return left + x * length, ground - wheel * 0.75 - y * height

    def shape(points: list[Point], colour: Rgb) -> None:
        pen.polygon([at(x, y) for x, y in points], fill=colour)

    shape([(0, 0), (0, 0.5), (rear, 0.56), (front, 0.56), (1, 0.42), (1, 0)], paint)
    shape([(rear, 0.5), (roof_rear, 1), (roof_front, 1), (front, 0.5)], paint)
    # Lamps grow longer and flatter with the years; old ones are round.
    long, flat = 0.05 + 0.025 * car.year, 0.16 - 0.022 * car.year
    for x, colour in ((1.0 - long, (255, 246, 196)), (0.0, (214, 36, 30))):
        box = (*at(x, 0.36 + flat / 2), *at(x + long, 0.36 - flat / 2))
        (pen.ellipse if car.year < 2 else pen.rectangle)(box, fill=colour, outline=(20, 20, 20))
    for cx, cy in (at(0.2, 0), at(0.8, 0)):
        pen.ellipse((cx - wheel, cy - wheel, cx + wheel, cy + wheel), fill=(22, 22, 24))
    # The make's sign on the door: a shape and a colour of its own.
    fill = ((250, 250, 250), (250, 214, 40), (20, 20, 20), (70, 200, 240))[car.make // 3]
    corners = (24, 3, 4)[car.make % 3]
    pen.regular_polygon((*at(0.5, 0.3), 0.17 * height * 1.15), corners, fill=fill, outline=(128, 128, 128))
