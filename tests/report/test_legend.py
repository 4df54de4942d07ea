"""Colours that can be told apart and read, by everybody, on light and dark grounds."""

import itertools

import pytest

from fulltilt.records import BUCKETS
from fulltilt.report.legend import BUCKET_LEGEND, IDLE, PHASE_LEGEND, LegendEntry

# Machado, Oliveira and Fernandes (2009), severity 1.0, on linear RGB.
VISION = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
}


def oklab(colour: str, vision: str) -> tuple[float, float, float]:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    r, g, b = (min(max(sum(m * c for m, c in zip(row, linear, strict=True)), 0), 1) for row in VISION[vision])
    long = (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3)
    middle = (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3)
    short = (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3)
    return (
        0.2104542553 * long + 0.793617785 * middle - 0.0040720468 * short,
        1.9779984951 * long - 2.428592205 * middle + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * middle - 0.808675766 * short,
    )


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours as WCAG defines it, from 1 to 21."""
    darker, lighter = sorted((_luminance(one), _luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def distance(one: LegendEntry, other: LegendEntry, vision: str) -> float:
    pairs = zip(oklab(one.colour, vision), oklab(other.colour, vision), strict=True)
    return sum((a - b) ** 2 for a, b in pairs) ** 0.5


def test_every_bucket_has_a_legend_entry():
    assert tuple(BUCKET_LEGEND) == BUCKETS


@pytest.mark.parametrize("vision", VISION)
def test_buckets_can_be_told_apart(vision):
    # The two greys share a colour: start-up is a solid block, unattributed is drawn faint, and both are named.
    entries = [entry for name, entry in BUCKET_LEGEND.items() if name != "unattributed_s"]
    for one, other in itertools.combinations(entries, 2):
        assert distance(one, other, vision) > 0.06, (one.label, other.label)
    waiting, computing = BUCKET_LEGEND["data_wait_s"], BUCKET_LEGEND["compute_s"]
    assert distance(waiting, computing, vision) > 0.2


@pytest.mark.parametrize("ground", ["#ffffff", "#181b20"])
def test_colours_stand_out_on_light_and_dark(ground):
    for phase, entry in {**BUCKET_LEGEND, **PHASE_LEGEND}.items():
        if phase not in (IDLE, "optimizer"):  # idle is an outline; optimizer always stands beside backward
            assert contrast(entry.colour, ground) >= 3, entry.label


def test_text_on_a_colour_can_be_read():
    for entry in {**BUCKET_LEGEND, **PHASE_LEGEND}.values():
        assert contrast(entry.colour, entry.ink) >= 4.3, entry.label
        assert contrast(entry.colour, entry.ink) == max(contrast(entry.colour, ink) for ink in ("#ffffff", "#111111"))
