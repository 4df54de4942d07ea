"""SpecAugment (Park et al. 2019) for feature windows: bands of time and of frequency are blanked out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fulltilt.feed.augment.colour import Draw


@dataclass(frozen=True)
class SpecAugment:
    """Blank ``time_masks`` bands of up to ``time_width`` steps, ``feature_masks`` of up to ``feature_width`` features.

    For windows [batch, time, features]. ``fill`` None puts the window's own mean in place of what is blanked.
    """

    time_masks: int = 2
    time_width: int = 10
    feature_masks: int = 2
    feature_width: int = 4
    fill: float | None = 0.0

    @property
    def draws(self) -> int:
        """Two numbers a band: its width and its start."""
        return 2 * (self.time_masks + self.feature_masks)

    def apply(self, windows: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The new windows."""
        steps, features = windows.shape[-2:]
        time_draws, feature_draws = torch.split(draw.u, [2 * self.time_masks, 2 * self.feature_masks], dim=1)
        time = _bands(time_draws, steps, self.time_width)[:, :, None]
        feature = _bands(feature_draws, features, self.feature_width)[:, None, :]
        blank = time | feature
        if self.fill is not None:
            return windows.masked_fill(blank, self.fill)
        return torch.where(blank, windows.mean(dim=(-2, -1), keepdim=True), windows)


def _bands(u: torch.Tensor, length: int, widest: int) -> torch.Tensor:
    """[batch, length]: where any of the bands lies. Widths are uniform on 0..widest, starts on what fits."""
    pairs = u.view(len(u), -1, 2)
    width = torch.floor(pairs[..., 0] * (min(widest, length) + 1))
    start = torch.floor(pairs[..., 1] * (length - width + 1))
    place = torch.arange(length, device=u.device)[None, None, :]
    return ((place >= start[..., None]) & (place < (start + width)[..., None])).any(dim=1)
