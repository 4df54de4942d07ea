"""Which loaders feed the training of a trial, where a script draws from several: zip(labelled, unlabelled)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Drawn(Protocol):
    """A loader's tap, as far as it matters here."""

    loader_id: int
    trains: bool
    batches: int


T = TypeVar("T", bound=Drawn)


class Company:
    """A loader trains if backward() came after its batch, or if it was drawn from in every step beside one that does.

    One that is drawn from now and then is for validation.
    """

    def __init__(self) -> None:
        self._before: dict[int, int] | None = None
        self._always: set[int] | None = None

    def after_step(self, taps: Sequence[T]) -> list[T]:
        """The loaders that feed the training, as far as seen up to this step."""
        now = {tap.loader_id: tap.batches for tap in taps}
        if self._before is not None:  # what was drawn before the first step may have been anything
            drawn = {loader for loader, batches in now.items() if batches > self._before.get(loader, 0)}
            self._always = drawn if self._always is None else self._always & drawn
        self._before = now
        return [tap for tap in taps if tap.trains or tap.loader_id in (self._always or ())]
