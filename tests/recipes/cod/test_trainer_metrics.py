"""The measures of the field against their reference implementation, pysodmetrics."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch

from fulltilt.recipes.cod import trainer as metrics
from fulltilt.recipes.synthetic import cod as made

REFERENCE = importlib.util.find_spec("py_sod_metrics") is not None
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def reference() -> Any:
    if not REFERENCE:
        pytest.skip("PYSODMETRICS IS NOT INSTALLED: the measures were compared with nothing")
    # Its other measures want OpenCV, scikit-image and scikit-learn; those that are compared here do not.
    stand_ins = ("cv2", "skimage", "skimage.color", "sklearn", "sklearn.neighbors", "sklearn.preprocessing")
    missing = [name for name in stand_ins if importlib.util.find_spec(name.split(".")[0]) is None]
    with pytest.MonkeyPatch.context() as patch:
        for name in missing:
            patch.setitem(sys.modules, name, _Anything(name))
        import py_sod_metrics

        return py_sod_metrics


class _Anything(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        return object


def pictures() -> tuple[torch.Tensor, torch.Tensor]:
    """Predictions from bad to perfect, and masks from empty to full, [n, 1, 72, 96]."""
    rng = np.random.default_rng(0)
    masks = np.stack([made.draw(number, 3)[1][:72, :96] > 0 for number in range(6)])
    masks[0, :, :] = False
    masks[0, 30, 40] = True
    noise = rng.random(masks.shape)
    soft = np.stack([0.2 * noise + 0.8 * np.roll(masks, shift, axis=2) for shift in (0, 3, 12)]).clip(0, 1)
    predictions = [*soft.reshape(-1, *masks.shape[1:]), *noise, *masks.astype(float), *np.zeros_like(noise)]
    truths = [*np.concatenate([masks] * 3), *masks, *masks, *masks]
    predictions += [noise[0], noise[1], np.zeros_like(noise[0]), np.ones_like(noise[0])]
    truths += [np.zeros_like(masks[0]), np.ones_like(masks[0]), np.zeros_like(masks[0]), np.ones_like(masks[0])]
    return torch.from_numpy(np.stack(predictions))[:, None], torch.from_numpy(np.stack(truths))[:, None]


def test_they_equal_the_reference_picture_by_picture(reference: Any) -> None:
    predictions, masks = pictures()
    # The reference takes saved images: both get the same 256 levels.
    levels = (predictions * 255).to(torch.uint8)
    ours = metrics.measure(levels.double() / 255 + 1e-9, masks.to(torch.uint8))
    wanted: dict[str, list[float]] = {name: [] for name in ("s_measure", "mae")}
    for level, mask in zip(levels[:, 0].numpy(), masks[:, 0].numpy(), strict=True):
        kinds = (reference.Smeasure(), reference.MAE())
        for kind in kinds:
            kind.step(pred=level, gt=mask.astype(np.uint8) * 255)
        s, m = kinds
        wanted["s_measure"].append(s.get_results()["sm"])
        wanted["mae"].append(m.get_results()["mae"])
    for name, values in wanted.items():
        assert np.abs(ours[name].numpy() - np.array(values)).max() < 1e-5, name


def test_iou_is_counted_at_one_half() -> None:
    mask = torch.zeros(3, 1, 4, 4, dtype=torch.uint8)
    mask[:2, :, :2, :2] = 1
    guess = torch.zeros(3, 1, 4, 4)
    guess[0, 0, :2, :] = 0.5  # eight found, four of them right
    guess[1, 0, :2, :2] = 0.49
    assert metrics.measure(guess, mask)["iou"].tolist() == [0.5, 0.0, 1.0]


def test_a_measure_does_not_depend_on_the_rest_of_the_batch() -> None:
    predictions, masks = pictures()
    together = metrics.measure(predictions, masks)
    for name, values in together.items():
        alone = [float(metrics.measure(predictions[i : i + 1], masks[i : i + 1])[name]) for i in (0, 7, 20)]
        assert alone == pytest.approx(values[[0, 7, 20]].tolist(), abs=1e-6), name
