"""What is wrong with the data, found before anything is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import ExifTags, Image, UnidentifiedImageError

from fulltilt.errors import DataError
from fulltilt.recipes.cod.options import CodOptions
from fulltilt.recipes.cod.pictures import PARTS, Pair, pairs
from fulltilt.recipes.recipe import Request

# Only headers are read, and a network disk answers many at once.
READERS = 16
_ON_ITS_SIDE = (5, 6, 7, 8)
REPLACE = "Replace it, or take it and its mask out."


def check(request: Request) -> None:
    """Raise DataError for the first thing that would stop the run later."""
    options: CodOptions = request.options
    for part in PARTS:
        check_pairs(pairs(request.data, part, noncam=options.include_noncam))


def check_pairs(listed: Sequence[Pair]) -> None:
    """Raise DataError when a picture has no mask, cannot be opened, or has a mask of another size."""
    folder = listed[0].mask.parent
    _refuse(
        listed,
        [pair for pair in listed if not pair.mask.is_file()],
        lambda pair: (f"no mask for {pair.picture}", f"Put it into {folder} as {pair.mask.name}."),
    )
    with ThreadPoolExecutor(READERS) as pool:
        sizes = list(pool.map(lambda pair: (_size(pair.picture), _size(pair.mask)), listed))
    differing = {
        pair: both
        for pair, both in zip(listed, sizes, strict=True)
        if both[0] != both[1] and both[1] != _upright_size(pair.picture)
    }
    _refuse(
        listed,
        list(differing),
        lambda pair: (
            f"{pair.mask} is {_words(differing[pair][1])}, its picture {_words(differing[pair][0])}",
            "A mask has the size of its picture: export it again, or take both out.",
        ),
    )


def _refuse(listed: Sequence[Pair], bad: list[Pair], tell: Callable[[Pair], tuple[str, str]]) -> None:
    if bad:
        what, remedy = tell(bad[0])
        more = f" ({len(bad)} of {len(listed)} are like that)" if len(bad) > 1 else ""
        raise DataError(f"{what}{more}", remedy)


def _size(path: Path) -> tuple[int, int]:
    try:
        with Image.open(path) as opened:
            width, height = opened.size
            return width, height
    except UnidentifiedImageError as error:
        raise DataError(f"{path} is no image that Pillow knows", REPLACE) from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"cannot open {path}: {getattr(error, 'strerror', None) or error}", REPLACE) from error


def _upright_size(path: Path) -> tuple[int, int]:
    """The size of a picture that its camera may have marked as lying on its side."""
    with Image.open(path) as opened:
        width, height = opened.size
        on_its_side = opened.getexif().get(ExifTags.Base.Orientation, 1) in _ON_ITS_SIDE
    return (height, width) if on_its_side else (width, height)


def _words(size: tuple[int, int]) -> str:
    return f"{size[0]}×{size[1]}"
